"""A benchmark of one route, and what its report says of the requests."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL, MODEL, TOKENIZER, ROUTE = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    report = Path(folder) / "report.json"
    options = {
        "backend": f"kind=openai_http,target={URL},model={MODEL},request_format={ROUTE}",
        "profile": "kind=concurrent,streams=2",
        "constraint": "kind=max_requests,count=6",
        "tokenizer": f"kind=hf_auto,model={TOKENIZER}",
        "data": "kind=synthetic_text,prompt_tokens=24,output_tokens=8",
        "output": f"kind=json,path={report}",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    command = [Path(sys.executable).parent / "guidellm", "run", *words, "--disable-console"]
    quiet = {"HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=os.environ | quiet, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout[-4000:] + done.stderr[-4000:])
    (found,) = json.loads(report.read_text())["benchmarks"]
json.dump(
    {
        "totals": found["metrics"]["request_totals"],
        "requests": [
            {
                "sent": json.loads(one["request_args"])["body"],
                "output": one["output"],
                "prompt_tokens": one["input_metrics"]["text_tokens"],
                "completion_tokens": one["output_metrics"]["text_tokens"],
            }
            for one in found["requests"]["successful"]
        ],
    },
    sys.stdout,
)
