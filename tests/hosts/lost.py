"""A failure as Monarch reports it, recorded: it happens in some milliseconds of a host's start."""

from __future__ import annotations


class Lost:
    """A failure as Monarch reports it where a host listens and has no agent yet."""

    mesh_name = "client"

    def __init__(self, address: str) -> None:
        self._agent = f"host_agent.service:<gmkDYMTEV4b>@{address}"

    def report(self) -> str:
        return (
            "The actor <monarch._src.actor.actor_mesh.RootClientActor client> and all its "
            f"descendants have failed:\n  undeliverable message to {self._agent}:\n"
            "  \tdescription: delivery of message from sender to dest failed\n"
            "  \tsender: client.local<EHzCUCECgfp>@ipc://@Rzz18zHB3YYAPujeSVJujMdB\n"
            f"  \tdest: {self._agent}\n"
            "  \tmessage type: hyperactor_mesh::host_mesh::host_agent::SetClientConfig\n"
            f"  \tdata_len: 5607\n  \terror: delivery failure: ttl expired for {self._agent}\n"
        )
