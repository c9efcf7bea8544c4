"""What a worker process is told about its place in the group, by environment variables."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass

from verl.single_controller.base.network import gloo_interface


@dataclass(frozen=True)
class RankEnvironment:
    """One rank's place. ``local_rank`` counts the group's ranks on the same node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int

    def variables(self) -> dict[str, str]:
        """The variables that torch.distributed and verl's users read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }

    def apply(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Sets the variables in this process, and GLOO_SOCKET_IFNAME where it is unset and needed."""
        environ.update(self.variables())
        if "GLOO_SOCKET_IFNAME" not in environ:
            interface = gloo_interface(self.master_addr)
            if interface is not None:
                environ["GLOO_SOCKET_IFNAME"] = interface
