"""Where the API server is and who we are: kubeconfig files and service accounts."""

import pytest
import yaml

from dra_driver.base.errors import SettingsError
from dra_driver.k8s.access import TokenFile, load_in_cluster, load_kubeconfig

IN_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}


def written(tmp_path, user=None, cluster=None, **changes):
    path = tmp_path / "kubeconfig"
    document = {
        "clusters": [
            {"name": "other", "cluster": {"server": "https://other"}},
            {"name": "c", "cluster": {"server": "https://here:6443"} | (cluster or {})},
        ],
        "users": [{"name": "u", "user": user or {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(document | changes))
    return path


def test_the_current_context_counts(tmp_path):
    access = load_kubeconfig(written(tmp_path, {"token": "secret"}))

    assert access.config["clusters"] == [
        {"name": "only", "cluster": {"server": "https://here:6443"}}
    ]
    assert access.token == "secret"
    assert "secret" not in repr(access)


def test_paths_start_where_the_kubeconfig_lies(tmp_path):
    user = {"client-certificate": "pki/me.crt", "client-key": "/abs/me.key", "tokenFile": "token"}
    access = load_kubeconfig(written(tmp_path, user, {"certificate-authority": "ca.crt"}))

    assert access.token_file == tmp_path / "token"
    assert access.config["clusters"][0]["cluster"]["certificate-authority"] == str(
        tmp_path / "ca.crt"
    )
    assert access.config["users"][0]["user"] == {
        "client-certificate": str(tmp_path / "pki/me.crt"),
        "client-key": "/abs/me.key",
    }


def test_a_program_that_would_give_a_token_is_left_out_where_there_is_another_way(tmp_path):
    user = {"exec": {"command": "aws"}, "token": "secret"}

    assert load_kubeconfig(written(tmp_path, user)).config["users"][0]["user"] == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"user": {"exec": {"command": "aws"}}}, "only 'exec'", id="only a program"),
        pytest.param({"current-context": ""}, "no current-context", id="no context chosen"),
        pytest.param({"current-context": "y"}, "context 'y'", id="a context that is not there"),
        pytest.param({"clusters": []}, "cluster 'c'", id="a cluster that is not there"),
        pytest.param({"cluster": {"server": ""}}, "no server", id="no address"),
    ],
)
def test_a_kubeconfig_that_leads_nowhere_is_refused(tmp_path, changes, message):
    with pytest.raises(SettingsError, match=message):
        load_kubeconfig(written(tmp_path, **changes))


@pytest.mark.parametrize("text", ["", "- a", "{", "\x00"])
def test_what_is_no_kubeconfig_is_refused(tmp_path, text):
    path = tmp_path / "kubeconfig"
    path.write_text(text)

    with pytest.raises(SettingsError, match=str(path)):
        load_kubeconfig(path)


def test_a_missing_kubeconfig_is_named(tmp_path):
    with pytest.raises(SettingsError, match="absent"):
        load_kubeconfig(tmp_path / "absent")


@pytest.mark.parametrize(
    ("host", "server"), [("10.0.0.1", "https://10.0.0.1:443"), ("fd00::1", "https://[fd00::1]:443")]
)
def test_in_a_pod_the_service_account_counts(tmp_path, host, server):
    (tmp_path / "token").write_text("secret")
    (tmp_path / "ca.crt").write_text("-")

    access = load_in_cluster(tmp_path, IN_POD | {"KUBERNETES_SERVICE_HOST": host})

    assert access.token_file == tmp_path / "token"
    assert access.config["clusters"][0]["cluster"] == {
        "server": server,
        "certificate-authority": str(tmp_path / "ca.crt"),
    }


def test_outside_a_pod_a_kubeconfig_is_asked_for(tmp_path):
    with pytest.raises(SettingsError, match="name a kubeconfig"):
        load_in_cluster(tmp_path, {})


def test_a_pod_without_a_token_is_told_what_to_set(tmp_path):
    with pytest.raises(SettingsError, match="automountServiceAccountToken"):
        load_in_cluster(tmp_path, IN_POD)


def test_a_token_is_read_from_its_file_once_a_minute(tmp_path):
    file, now = tmp_path / "token", 100.0
    file.write_text("first\n")
    token = TokenFile(file, lambda: now)
    assert token.token() == "first"
    file.write_text("second\n")

    now = 159.0
    assert token.token() == "first"
    now = 160.0
    assert token.token() == "second"


def test_a_token_that_was_refused_is_read_again_at_once(tmp_path):
    file = tmp_path / "token"
    file.write_text("first\n")
    token = TokenFile(file)
    assert token.token() == token.token(refused="first") == "first"
    file.write_text("second\n")

    assert token.token(refused="older") == "first"  # of a request that was sent before
    assert token.token(refused="first") == token.token() == "second"
