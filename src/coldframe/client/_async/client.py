"""The client: where sandboxes come from."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from coldframe.client._address import opener
from coldframe.client._arguments import typed_arguments, typed_methods
from coldframe.client._async.sandbox import AsyncSandbox
from coldframe.client._core import ClientCore
from coldframe.client._link import NodeOpener
from coldframe.client._requests import event_kind, sandbox_spec
from coldframe.client._runner import AsyncRunner
from coldframe.protocol.models import GIB, Capabilities, EventKind, ImageInfo, Ledger, SandboxEvent
from coldframe.protocol.network import NetworkLike, network_policy


@typed_methods
class AsyncSandboxClient:
    """Makes and finds sandboxes: on the machine's node, a service's, or one in this process.

    The node is opened on the first use, and the machine's is started if there is none. Closing the
    client deletes the sandboxes that it made, and so does leaving its `with` block. A synchronous
    client is closed at the end of the program too; an asynchronous one cannot be, since its event
    loop has ended by then. Sandboxes that nobody deleted, those of a killed program too, end with
    their lease; on a node in this process with it (`coldframe gc` reaps what is left). Any number
    of threads or tasks may use one client. A forked process opens one of its own
    (ClientClosedError otherwise).

    Everything raises ClientClosedError, and what the node is opened or reached with:
    CapabilityError (this machine cannot run it), NotPermittedError, NotAuthenticatedError,
    ServiceUnreachableError, VersionMismatchError.
    """

    @typed_arguments
    def __init__(
        self,
        *,
        url: str | None = None,
        api_key: str | None = None,
        home: str | Path | None = None,
        runtime: str | None = None,
        in_process: bool = False,
        open_node: NodeOpener | None = None,
    ) -> None:
        """Say which node to use. Without `url` and `in_process`: the machine's.

        Args:
            url: of a service: `unix:/PATH`, `http://HOST:PORT`, `https://HOST:PORT`, or
                `in-process`; default COLDFRAME_URL.
            api_key: for a service that asks for one; default COLDFRAME_API_KEY.
            home: where images and state are, and the machine's node with them; default
                COLDFRAME_HOME, else /var/lib/coldframe. Counts more than COLDFRAME_URL.
            runtime: `native`, or `fake`: no isolation; default COLDFRAME_RUNTIME, else `native`.
                A machine's node that runs with another is refused. Counts more than COLDFRAME_URL.
            in_process: run a node in this process: commands cost least, and end with it.
            open_node: opens another node than that; called once, on the client's event loop.
        """
        self._core = ClientCore(
            open_node or opener(url, api_key, home, runtime, in_process=in_process)
        )
        self._runner = AsyncRunner(self._core.close)

    async def __aenter__(self) -> Self:
        await self._runner.run(self._core.link())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Delete the sandboxes that this client made, and end its node. Twice is fine."""
        await self._runner.close()

    async def create_sandbox(
        self,
        image: str,
        *,
        cpu: float = 4.0,
        memory_bytes: int = 4 * GIB,
        pids: int = 1024,
        disk_bytes: int | None = None,
        shm_bytes: int = GIB,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        user: str | int | None = None,
        labels: Mapping[str, str] | None = None,
        ttl_s: float | None = 7200.0,
        name: str | None = None,
        no_new_privileges: bool = False,
        network: NetworkLike = None,
        operation_id: str | None = None,
    ) -> AsyncSandbox:
        """Make a sandbox; it is ready for commands when this returns.

        Args:
            image: name or digest of an image in the store.
            cpu: in processors.
            memory_bytes: limit of all its processes, /dev/shm included.
            pids: how many processes and threads it may have.
            disk_bytes: how much it may write; None: what the store has.
            shm_bytes: size of /dev/shm.
            env: added to the image's, for every command.
            workdir: where commands start; None: the image's.
            user: who runs commands, name or id, optionally `user:group`; None: the image's.
            labels: free text by which `list_sandboxes` finds it.
            ttl_s: it is deleted after so many seconds, unless renewed; None: never.
            name: unique among live sandboxes.
            no_new_privileges: setuid programs gain nothing.
            network: what it may reach: a policy, or rules such as `files.example:443`,
                `*.example`, `203.0.113.0/24`, `public`, `presets`; None: nothing but itself.
            operation_id: the same id again gives the same sandbox and makes no other.
        Raises:
            ImageNotFoundError, NameInUseError, InvalidRequestError, CapacityError: refused.
            CreateError, CapabilityError, StorageFullError: it failed; nothing of it is left.
        """
        spec = sandbox_spec(
            image,
            cpu=cpu,
            memory_bytes=memory_bytes,
            pids=pids,
            disk_bytes=disk_bytes,
            shm_bytes=shm_bytes,
            env=None if env is None else dict(env),
            workdir=workdir,
            user=user,
            labels=None if labels is None else dict(labels),
            ttl_s=ttl_s,
            name=name,
            no_new_privileges=no_new_privileges,
            network=network_policy(network),
        )
        info = await self._runner.run(self._core.create(spec, operation_id))
        return AsyncSandbox(self._core, self._runner, info)

    async def get_sandbox(self, id_or_name: str) -> AsyncSandbox:
        """Return a sandbox by id, or by name while it lives.

        Raises:
            SandboxNotFoundError: there is none.
        """
        info = await self._runner.run(self._core.get(id_or_name))
        return AsyncSandbox(self._core, self._runner, info)

    async def list_sandboxes(
        self, labels: Mapping[str, str] | None = None
    ) -> tuple[AsyncSandbox, ...]:
        """Return the live sandboxes that carry all these labels, oldest first."""
        infos = await self._runner.run(self._core.list(labels))
        return tuple(AsyncSandbox(self._core, self._runner, info) for info in infos)

    async def delete_sandbox(self, id_or_name: str, *, operation_id: str | None = None) -> None:
        """End a sandbox; nothing of it is left when this returns. One that ended is fine.

        Args:
            id_or_name: a name is that of a live one.
            operation_id: the same id again ends no other that has the name by then.
        Raises:
            SandboxNotFoundError: none has, or is remembered to have had, this id or name.
        """
        await self._runner.run(self._core.delete(id_or_name, operation_id))

    async def list_images(self) -> tuple[ImageInfo, ...]:
        """Return the named images of the node's store; none if it has no store."""
        return await self._runner.run(self._core.list_images())

    async def build_image(
        self,
        name: str,
        context: str | Path,
        *,
        dockerfile: str | Path | None = None,
        build_args: Mapping[str, str] | None = None,
        target: str | None = None,
        network: NetworkLike = "presets",
        deadline_s: float = 600.0,
        cached: bool = True,
        operation_id: str | None = None,
    ) -> str:
        """Build a Dockerfile into the node's store and return the image's digest.

        RUN steps run in sandboxes under a network policy; each is a cached layer.

        Args:
            name: what `create_sandbox` will call it.
            context: the directory that COPY copies from.
            dockerfile: default: `Dockerfile` in the context.
            build_args: values for ARG.
            target: the stage to build, by name or number; None: the last.
            network: what RUN may reach; by default the node's own package indexes, None: nothing.
            deadline_s: of each RUN step.
            cached: whether steps that were done before are taken from the store.
            operation_id: the same id again gives the first answer and builds nothing.
        Raises:
            DockerfileError: a line is refused; begins with file:line.
            BuildStepError: a RUN failed; begins with file:line.
            ImageError, ImageNotFoundError, InvalidRequestError, StorageFullError: refused.
            CapabilityError: the node has no store to build into.
            NotPermittedError: by a service, with a key that lacks the scope `admin`.
        """
        file = None if dockerfile is None else Path(dockerfile)
        return await self._runner.run(
            self._core.build_image(
                name,
                Path(context),
                dockerfile=file,
                build_args=build_args,
                target=target,
                network=network_policy(network),
                deadline_s=deadline_s,
                cached=cached,
                operation_id=operation_id,
            )
        )

    def events(
        self, cursor: str | None = None, *, follow: bool = True, kind: str = EventKind.STATE
    ) -> AsyncIterator[SandboxEvent]:
        """Iterate what happens to sandboxes as it comes, for ever; with a key only one's own.

        Args:
            cursor: of the last event that was seen, or `oldest` for all that the node keeps; None:
                from the first step of the iteration on.
            follow: whether to wait for what comes; else it ends with what there is.
            kind: `state`, `egress`, `tamper` or `storage`, see `EventKind`; each has cursors of
                its own.
        Raises:
            CursorExpiredError: what followed the cursor is kept no longer in whole; list the
                sandboxes and go on from its `oldest`.
        """
        return self._runner.iterate(self._core.events(cursor, event_kind(kind), follow=follow))

    async def ledger(self) -> Ledger:
        """Count all sandboxes of the node and compare the kernel with those that live."""
        return await self._runner.run(self._core.ledger())

    async def capabilities(self) -> Capabilities:
        """What the runtime has probed on this machine."""
        return await self._runner.run(self._core.capabilities())
