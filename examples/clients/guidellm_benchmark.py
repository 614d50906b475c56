"""A benchmark with guidellm. Run it: python examples/clients/guidellm_benchmark.py http://127.0.0.1:8080 my-model

`pip install guidellm`. Two clients at once send prompts of random words; the report has time to first token, time
between tokens and tokens per second. The directory of the model is read for its tokenizer only.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

TOLD = {"time_to_first_token_ms": "time to first token", "inter_token_latency_ms": "time between tokens"}


def main(address: str, directory: str) -> None:
    name = httpx.get(f"{address}/v1/models").json()["data"][0]["id"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = {
            "--backend": f"kind=openai_http,target={address},model={name}",
            "--profile": "kind=concurrent,streams=2",
            "--constraint": "kind=max_requests,count=6",
            "--tokenizer": f"kind=hf_auto,model={directory}",
            "--data": "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
            "--output": f"kind=json,path={report}",
        }
        words = [word for pair in options.items() for word in pair]
        command = [str(Path(sys.executable).parent / "guidellm"), "run", *words, "--disable-console"]
        subprocess.run(command, check=True)
        (found,) = json.loads(report.read_text())["benchmarks"]
    metrics = found["metrics"]
    totals = metrics["request_totals"]
    print(f"{totals['successful']} requests succeeded and {totals['errored']} failed")
    for key, about in TOLD.items():
        print(f"{about}: {metrics[key]['successful']['median']:.1f} ms at the median")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="of the server, without a path")
    parser.add_argument("directory", help="of the model, or its name on the hub")
    given = parser.parse_args()
    main(given.address, given.directory)
