"""The examples run, and what they claim holds."""

import importlib.util
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_hand_written_model_on_the_memory_gives_the_logits_of_a_forward_without_sharing() -> None:
    assert example("handwritten").main() < 1e-5


def test_generate_of_transformers_goes_on_from_memory_and_from_a_store() -> None:
    with TemporaryDirectory() as store:
        first, second = example("generate").main(store)
    assert first.startswith("import os\nimport")
    assert second.startswith("def main():\n")


def test_a_drafter_gives_the_same_text_in_fewer_steps() -> None:
    without, steps, report = example("drafter").main()
    assert without == 400
    assert steps < 0.7 * without
    assert report.rounds == steps
    assert report.accepted == without - steps


def test_every_example_is_tested_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"handwritten", "generate", "drafter"}
