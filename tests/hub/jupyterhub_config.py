"""Configure the JupyterHub of the tests. It is run by JupyterHub; `tests.hub.hub.Hub` passes its values as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from jupyterhub.spawner import LocalProcessSpawner  # pyright: ignore[reportMissingImports]

given: dict[str, Any] = json.loads(os.environ.pop("MK_HUB"))


class NumberSpawner(LocalProcessSpawner):
    """Starts the server of each user as a user of this machine who has a number and a home, but no account."""

    def user_env(self, env: dict[str, str]) -> dict[str, str]:
        """Return the variables with those that a login sets."""
        return {**env, "USER": self.user.name, "HOME": f"{given['homes']}/{self.user.name}", "SHELL": "/bin/sh"}

    def make_preexec_fn(self, name: str) -> Callable[[], None]:
        """Return what the new process does before it runs the server."""
        uid = given["users"][name]

        def become() -> None:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.umask(0o022)
            os.chdir(f"{given['homes']}/{name}")

        return become


c = get_config()  # type: ignore[name-defined]  # noqa: F821  # JupyterHub defines it
c.JupyterHub.bind_url = given["url"]
c.JupyterHub.hub_bind_url = f"http://127.0.0.1:{given['hub_port']}"
c.JupyterHub.db_url = "sqlite:///:memory:"
c.JupyterHub.cookie_secret_file = f"{given['private']}/cookie_secret"
c.JupyterHub.spawner_class = NumberSpawner
c.JupyterHub.authenticator_class = "dummy"
c.DummyAuthenticator.password = given["password"]
c.Authenticator.allowed_users = set(given["users"])
c.JupyterHub.services = [{"name": "tests", "api_token": given["token"]}]
scopes = ["admin:users", "admin:servers", "tokens", "access:servers"]
c.JupyterHub.load_roles = [{"name": "tests", "services": ["tests"], "scopes": scopes}]
c.ConfigurableHTTPProxy.command = given["proxy"]
c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{given['proxy_port']}"
c.ConfigurableHTTPProxy.pid_file = f"{given['private']}/proxy.pid"
c.LocalProcessSpawner.interrupt_timeout = 1  # a server asks then whether it is meant; SIGTERM ends it
c.Spawner.cmd = given["server"]
c.Spawner.notebook_dir = "~/work"
c.Spawner.default_url = "/lab"
c.Spawner.start_timeout = c.Spawner.http_timeout = 180
c.Spawner.environment = given["environment"]
