"""Start a server and talk to it with the official client: python examples/serve_client.py [MODEL].

Needs kvcatch[serve] and openai. Any OpenAI client works: give it the URL that ``kvcatch serve`` prints.
"""

import re
import subprocess
import sys

from openai import OpenAI

command = [sys.executable, "-m", "kvcatch.cli", "serve", "--port", "0", "--num-blocks", "256"]
command += ["--model", sys.argv[1]] if len(sys.argv) > 1 else []
server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
assert server.stderr is not None
url = None
for line in server.stderr:
    print(line, end="")
    if found := re.search(r"http://\S+/v1", line):
        url = found.group()
        break
assert url is not None, "the server did not start"

client = OpenAI(base_url=url, api_key="none")
model = client.models.list().data[0].id
whole = client.completions.create(model=model, prompt="The sky is", max_tokens=12, temperature=0)
print(repr(whole.choices[0].text))

chunks = client.completions.create(
    model=model,
    prompt="The sky is",
    max_tokens=12,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in chunks:
    if chunk.choices:
        print(repr(chunk.choices[0].text))
    elif chunk.usage is not None:
        print(chunk.usage)

server.terminate()  # accepted requests are answered first
assert server.wait(60) == 0
print(server.stderr.read(), end="")
