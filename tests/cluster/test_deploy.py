"""The files in deploy/ for Ray describe clusters that `app` and Ray take."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed (pip install kvcellar[cluster])")

import yaml
from ray.serve.schema import ServeDeploySchema

from kvcellar.cluster import app
from tests.engine.places import model_in

DEPLOY = Path(__file__).parents[2] / "deploy"


def rayservice() -> dict[str, Any]:
    return next(one for one in yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()) if one["kind"] == "RayService")


def described(name: str) -> dict[str, Any]:
    """As Ray Serve is given it."""
    if name == "kuberay.yaml":
        return yaml.safe_load(rayservice()["spec"]["serveConfigV2"])
    return yaml.safe_load((DEPLOY / name).read_text())


@pytest.mark.parametrize("name", ["ray-serve.yaml", "kuberay.yaml"])
def test_ray_takes_what_a_file_describes_and_app_makes_a_cluster_of_it(name: str, tmp_path: Path) -> None:
    """With a model and keys of this machine."""
    (application,) = ServeDeploySchema.model_validate(described(name)).applications
    assert application.import_path == "kvcellar.cluster:app"
    keys = tmp_path / "keys.txt"
    keys.write_text("key-of-a-client-that-is-long-enough\n")
    given = application.args | {"models": [str(model_in(tmp_path / "model"))], "api_key_file": str(keys)}
    assert app(given)._bound_deployment.name == "gateway"


def test_a_rayservice_runs_the_ray_that_is_installed_with_tokens() -> None:
    found = rayservice()["spec"]["rayClusterConfig"]
    assert found["authOptions"] == {"mode": "token"}
    constraints = (DEPLOY.parent / "constraints.txt").read_text()
    assert re.findall(r"^ray==(.*)$", constraints, re.M) == [found["rayVersion"]]


def test_pods_of_a_rayservice_have_the_files_that_it_names_and_the_labels_of_its_policy() -> None:
    found, policy = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
    cluster = found["spec"]["rayClusterConfig"]
    (application,) = described("kuberay.yaml")["applications"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]
        assert pod["metadata"]["labels"] == policy["spec"]["podSelector"]["matchLabels"]
        (container,) = pod["spec"]["containers"]
        mounts = [Path(one["mountPath"]) for one in container["volumeMounts"]]
        for path in (*application["args"]["models"], application["args"]["api_key_file"]):
            assert any(Path(path).is_relative_to(one) for one in mounts), path
        assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["spec"]["volumes"]}
