"""Every kernel of ``cuda/`` is silent under every sanitizer, on small shapes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the emulated backend makes torch tensors")

from cuda_host import sanitize
from cuda_host.build import CUDA
from cuda_host.emulated import EmulatedBackend
from cuda_host.kernel import ORDERS
from cuda_host.scenarios import SCENARIOS, run


@pytest.mark.sanitizer
@pytest.mark.parametrize("sanitizer", sanitize.OPTIONS)
def test_small_scenarios_are_silent(sanitizer: str) -> None:
    done = sanitize.run("scenarios", sanitizer)
    assert not done.returncode, done.stdout + done.stderr
    small = [name for name, scenario in SCENARIOS.items() if scenario.small]
    assert done.stdout.count("silent") == len(small)


def test_small_scenarios_launch_every_kernel() -> None:
    launched = set()

    class Noting(EmulatedBackend):
        def __init__(self) -> None:
            super().__init__()
            launch = self.runtime.launch

            def noted(source: str, kernel: str, *rest: object) -> None:
                launched.add(kernel)
                launch(source, kernel, *rest)  # type: ignore[arg-type]

            self.runtime.launch = noted  # type: ignore[method-assign]

    for name, scenario in SCENARIOS.items():
        if scenario.small:
            run(name, Noting())
    text = "".join(path.read_text() for path in CUDA.glob("*.cu"))
    assert launched == {
        line[13:-1] for line in text.splitlines() if line.startswith("KVEMU_KERNEL(")
    }


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_is_the_same_in_all_orders(name: str) -> None:
    run(name, EmulatedBackend(ORDERS, seed=7))
