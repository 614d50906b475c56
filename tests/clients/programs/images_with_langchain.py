"""A question about an image as OpenAI's chat and by the Responses API, in the content blocks that LangChain has."""

import json
import sys

from langchain_openai import ChatOpenAI

URL, MODEL, IMAGE, QUESTION = sys.argv[1:]
DATA = IMAGE.partition(",")[2]
CONTENTS = {
    "image_url": [{"type": "image_url", "image_url": {"url": IMAGE}}],
    "image": [{"type": "image", "base64": DATA, "mime_type": "image/png"}],
}
found = {}
for responses in (False, True):
    model = ChatOpenAI(
        model=MODEL,
        base_url=f"{URL}/v1",
        api_key="any",
        max_retries=0,
        max_tokens=16,
        temperature=0.0,
        use_responses_api=responses,
    )
    for name, image in CONTENTS.items():
        message = {"role": "user", "content": [*image, {"type": "text", "text": QUESTION}]}
        answer = model.invoke([message])
        streamed = "".join(part.text for part in model.stream([message]))
        tokens = answer.usage_metadata["input_tokens"]
        found[f"{name} {responses}"] = {"text": answer.text, "streamed": streamed, "prompt_tokens": tokens}
json.dump(found, sys.stdout)
