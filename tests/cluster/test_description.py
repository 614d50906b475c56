"""What `app` makes of the description of a cluster, and what Ray is told of it; Ray is not started."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed (pip install kvcellar[cluster])")

from ray import cloudpickle

from kvcellar import BadRequest
from kvcellar.cluster import app
from kvcellar.cluster.gateway import Deployed

KEY = bytes(range(60, 92))
PASSWORD = "open-sesame-of-the-cellar"
API_KEY = "key-of-a-client-that-is-long-enough"


def deployed(**given: Any) -> dict[str, Deployed]:
    """The engines, as gateways are told of them."""
    return app(given)._bound_deployment.init_args[0]


def of(engine: Deployed, at: int = 0) -> Any:
    """The deployment of its replicas."""
    return engine.handles[at]._bound_deployment


@pytest.fixture
def secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Files."""
    monkeypatch.setenv("KVCELLAR_ADMIN_KEY", f"admin-{API_KEY}")
    texts = {"store_key_file": KEY.hex(), "store_remote_file": f"redis://:{PASSWORD}@host:6379/0\n"}
    texts["api_key_file"] = API_KEY
    files = {name: tmp_path / name for name in texts}
    for name, file in files.items():
        file.write_text(texts[name])
        file.chmod(0o600)
    return {name: str(file) for name, file in files.items()}


def test_ray_is_told_no_secret(secrets: dict[str, str]) -> None:
    application = app({"gateways": 2, "prefill": 1, **secrets})
    (engine,) = application._bound_deployment.init_args[0].values()
    told = cloudpickle.dumps((application, of(engine).init_args, of(engine, 1).init_args))
    for secret in (KEY, KEY.hex().encode(), PASSWORD.encode(), API_KEY.encode()):
        assert secret not in told
    assert engine.settings == {name: file for name, file in secrets.items() if name != "api_key_file"}


@pytest.mark.parametrize(
    ("engine", "param"),
    [
        ({"store_key": KEY}, "store_key"),
        ({"store_remote": f"redis://:{PASSWORD}@host:6379"}, "store_remote"),
        ({"store_remote": f"redis://user:{PASSWORD}@host:6379"}, "store_remote"),
        ({"store_remote": f"redis://host:6379/0?password={PASSWORD}"}, "store_remote"),
        ({"store_remote": f"s3://bucket/path?secret={PASSWORD}"}, "store_remote"),
    ],
)
def test_a_secret_that_ray_would_be_told_is_refused(engine: dict[str, Any], param: str) -> None:
    for given in ({"engine": engine}, {"models": [{"engine": engine}]}):
        with pytest.raises(BadRequest, match="Ray's dashboard would show") as caught:
            app(given)
        assert caught.value.param == param
        assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize("name", ["store_key_file", "store_remote_file", "api_key_file"])
def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadRequest, match="nowhere cannot be read") as caught:
        app({name: str(tmp_path / "nowhere")})
    assert caught.value.param == name


def test_models_have_options_of_all_and_of_their_own(tmp_path: Path) -> None:
    adapters = {"style": str(tmp_path)}
    found = deployed(
        models=["models/one", {"path": "models/2/two", "name": "second", "engine": {"weights": "int4", "threads": 2}}],
        replicas=2,
        engine={"threads": 1, "draft": "ngram", "adapters": adapters},
        engine_resources={"num_cpus": 3},
    )
    assert list(found) == ["one", "second"]
    assert found["one"].settings == {"threads": 1, "draft": "ngram", "adapters": adapters}
    assert found["second"].settings == {"threads": 2, "draft": "ngram", "weights": "int4"}
    assert [of(one).name for one in found.values()] == ["engine-one", "engine-second"]
    assert [of(one).init_args[0] for one in found.values()] == ["models/one", "models/2/two"]


def test_a_model_may_have_its_own_replicas_roles_and_resources() -> None:
    own = {"path": "two", "replicas": "0..3", "engine_resources": {"num_gpus": 2}}
    roles = {"path": "three", "prefill": 1, "engine": {"store_remote": "file:///shared"}}
    found = deployed(models=["one", own, roles], replicas=2, engine_resources={"num_cpus": 3})
    assert [one.to_zero for one in found.values()] == [False, True, False]
    assert [len(one.handles) for one in found.values()] == [1, 1, 2]
    assert [of(one).num_replicas for one in found.values()][::2] == [2, 2]
    assert [of(one).ray_actor_options["num_gpus"] for one in found.values()] == [0, 2, 0]
    assert {of(one).ray_actor_options["num_cpus"] for one in found.values()} == {3}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"models": ["a/one", {"path": "b/one"}]}, "two models have one name"),
        ({"models": [{"name": "a name"}]}, "this is no description of a cluster"),
        ({"models": [{"weights": "int4"}]}, "unknown field `weights`"),
        ({"models": [{"engine": {"weigths": "int4"}}]}, "there is no engine setting"),
        ({"models": [{"replicas": "3..1"}]}, "replicas are a number"),
        ({"models": [{"prefill": 1}]}, "replicas for prompts need others"),
    ],
)
def test_a_model_that_is_described_wrongly_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        app(given)


def test_engines_are_made_anew_by_what_they_are_made_of(tmp_path: Path) -> None:
    def made(**given: Any) -> str:
        return next(iter(deployed(**given).values())).made

    same = {"models": ["/srv/1/one"], "engine": {"threads": 1}}
    assert made(**same) == made(**same, replicas=3, server={"max_headers": 50})
    assert len({made(**same), made(models=["/srv/2/one"], engine={"threads": 1}), made(models=["/srv/1/one"])}) == 3


def test_several_gateways_need_a_place_that_all_have() -> None:
    with pytest.raises(BadRequest, match="what one remembers, others must find") as caught:
        app({"gateways": 2})
    assert caught.value.param == "gateways"
    app({"gateways": 1})
    for place in ({"store": "/shared"}, {"store_remote": "redis://host:6379"}, {"store_remote": "file:///shared"}):
        app({"gateways": 2, "engine": place})
    with pytest.raises(BadRequest, match="what one remembers"):
        app({"gateways": 2, "engine": {"store_remote": "s3://bucket/path"}})


@pytest.mark.parametrize(("server", "seconds"), [({}, 600.0), ({"drain_seconds": 40.0}, 40.0)])
def test_what_ends_has_time_for_its_requests(server: dict[str, Any], seconds: float) -> None:
    bound = app({"server": server})._bound_deployment
    assert bound._deployment_config.graceful_shutdown_timeout_s == seconds
    replicas = of(bound.init_args[0]["embedded"])
    assert replicas._deployment_config.graceful_shutdown_timeout_s == seconds + 30
    assert replicas.init_args[3] == seconds
