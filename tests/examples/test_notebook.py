"""The notebook runs from top to bottom in a fresh kernel, and is stored without what it has printed."""

import ast
import os
from importlib import import_module
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from benchmarks.drafts import held_out
from tests.serve.fake_engine import PATIENCE

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "memory.ipynb"
PLOTS = ["Prefill", "K/V", "Weights", "Accepted"]  # titles, in the order of the plots


@pytest.fixture
def notebook() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_it_is_stored_without_outputs(notebook) -> None:
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [(cell.outputs, cell.execution_count) for cell in code] == [([], None)] * len(code)
    assert "widgets" not in notebook.metadata


def test_each_piece_of_code_is_explained(notebook) -> None:
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds[0] == kinds[-1] == "markdown"
    assert all("code" not in kinds[at : at + 3] or "markdown" in kinds[at : at + 3] for at in range(len(kinds) - 2))


def test_its_links_to_documents_and_examples_have_targets(notebook) -> None:
    last = notebook.cells[-1].source
    named = [word.strip("`:") for word in last.split() if word.startswith("`")]
    assert named
    assert all((ROOT / name).exists() for name in named)


def test_what_it_imports_of_ours_exists(notebook) -> None:
    trees = [ast.parse(cell.source) for cell in notebook.cells if cell.cell_type == "code"]
    imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = [(node.module or "", one.name) for node in imports for one in node.names]
    ours = [(module, name) for module, name in ours if module.split(".")[0] in ("benchmarks", "kvcellar")]
    assert ours
    for module, name in ours:
        assert getattr(import_module(module), name)


@pytest.mark.slow
@pytest.mark.skipif(not held_out(), reason="this interpreter has none of the modules that the drafts are counted on")
def test_it_runs_in_a_fresh_kernel_and_plots(notebook, tmp_path, monkeypatch) -> None:
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))))
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")  # beside the folder of the notebook, as in a checkout
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path / "examples")
    NotebookClient(notebook, timeout=PATIENCE, kernel_name="python3").execute()
    outputs = [(cell.source, output) for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [source for source, output in outputs if "image/png" in output.get("data", {})]
    assert len(shown) == len(PLOTS)
    assert all(title in source for title, source in zip(PLOTS, shown, strict=True))
    warned = [output.text for _, output in outputs if output.get("name") == "stderr"]
    assert all("IProgress not found" in text for text in warned), "tqdm misses the widgets of notebooks; nothing else"
