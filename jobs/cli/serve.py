"""`serve`: files and batches over HTTP, for the official `openai` client."""

from __future__ import annotations

import ipaddress
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbatch.jobs.cli.checks import check_job, check_models_first
from specbatch.jobs.cli.connect import check_broker, forgiving_enqueue, load_settings
from specbatch.jobs.cli.console import remark
from specbatch.schemas.errors import UsageError, first_line
from specbatch.schemas.extras import require_engine_extra, require_serve_extra
from specbatch.schemas.settings import Settings

if TYPE_CHECKING:
    from specbatch.jobs.serve.file_store import FileStore
    from specbatch.jobs.serve.models import ServedModel
    from specbatch.jobs.serve.reconciler import Reconciler
    from specbatch.jobs.serve.service import Service

ServeDir = Annotated[
    Path,
    typer.Option("--dir", help="folder of the service: its files and, unless SPECBATCH_ says "
    "where others are, its store"),
]  # fmt: skip
DIR = Path("specbatch-serve")


def serve(
    models: Annotated[Path, typer.Option("--models", help="YAML file of the models to serve")],
    dir: ServeDir = DIR,
    host: Annotated[str, typer.Option("--host", help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any")] = 8000,
    no_keys: Annotated[
        bool, typer.Option("--no-keys", help="ask for no API key; only on a loopback address")
    ] = False,
    max_file_mib: Annotated[
        int, typer.Option("--max-file-mib", min=1, help="size of an uploaded file")
    ] = 512,
    max_requests: Annotated[
        int, typer.Option("--max-requests", min=1, help="requests of a batch")
    ] = 50_000,
    max_open_batches: Annotated[
        int, typer.Option("--max-open-batches", min=1, help="of a tenant at once")
    ] = 100,
    rate: Annotated[
        str, typer.Option("--rate", help="requests of an API key; `off` for no limit")
    ] = "1200/minute",
    page: Annotated[
        bool, typer.Option("--page/--no-page", help="whether to show jobs in a browser, at /")
    ] = True,
) -> None:
    """Serve files and batches over HTTP as OpenAI does, to its own clients.

    Without SPECBATCH_BROKER_URL batches run here, one at a time, in a process beside the service;
    with it the workers of that broker do them. Ctrl-C stops both; the next start resumes.
    """
    if no_keys and not is_loopback(host):
        raise UsageError(
            f"--no-keys is for loopback addresses only, as 127.0.0.1; {host} is not one"
        )
    require_serve_extra()
    from specbatch.jobs.serve.file_store import FileStore
    from specbatch.jobs.serve.locks import only_one
    from specbatch.jobs.serve.models import load_models
    from specbatch.jobs.serve.rates import Rates, rate_of
    from specbatch.pipeline.bootstrap import make_client, make_store
    from specbatch.pipeline.privacy.tenants import Privacy

    most = rate_of(rate)
    served = load_models(models)
    settings = serving_settings(dir)
    embedded = is_embedded(settings)
    _check(settings, embedded)
    privacy = Privacy.of_settings(settings)
    privacy.check_key()
    file_store = FileStore(dir.absolute(), settings.store_mode)
    try:
        file_store.make()
    except OSError as error:
        raise UsageError(
            f"--dir {dir} cannot be the service's folder: {first_line(error)}"
        ) from None
    busy = f"another `specbatch serve` uses {dir}: stop that one first, or use another --dir"
    with only_one(dir / "serve.lock", busy), closing(make_store(settings)) as store:
        keys, now = store.api_keys()
        if not no_keys and not any(key.why_not(now) is None for key in keys):
            raise UsageError(
                "there is no valid API key yet: make one with `specbatch api-keys create NAME "
                f"--dir {dir}`, or start with --no-keys on a loopback address"
            )
        known = store.file_ids(file_store.service_id)
        file_store.check_store(known)
        file_store.finish_changes(known)
        file_store.sweep()
        if embedded:
            check_models(settings, file_store, served.values())
        client = make_client(settings, forgiving_enqueue(settings), store)
        from specbatch.jobs.serve.reconciler import Reconciler
        from specbatch.jobs.serve.service import Service

        reconciler = Reconciler(store, client, file_store, served, max_requests, privacy)
        service = Service(
            *(store, client, file_store, served, int(time.time()), reconciler.wake, not no_keys),
            privacy=privacy,
            most_file_bytes=max_file_mib << 20,
            most_open=max_open_batches,
            rates=None if most is None else Rates(most),
            page=settings if page and not no_keys else None,
        )
        _listen(service, reconciler, settings, embedded, host, port)


def _check(settings: Settings, embedded: bool) -> None:
    """Refuse now what would fail every batch. Raises `SpecbatchError`."""
    if not embedded:
        check_broker(settings)
        return
    require_engine_extra()
    if settings.tensor_parallel > 1:
        raise UsageError(
            "SPECBATCH_TENSOR_PARALLEL is for `specbatch worker`: unset it, or set "
            "SPECBATCH_BROKER_URL and start workers"
        )


def check_models(settings: Settings, file_store: FileStore, served: Iterable[ServedModel]) -> None:
    """Check a batch of each model as `submit-job --local` checks a job. Raises `UsageError` naming
    the model and what is wrong."""
    from specbatch.jobs.serve.models import EXAMPLE
    from specbatch.schemas.file_modes import new_file

    source = file_store.uploads / "example.jsonl"
    try:
        with new_file(source, file_store.access) as file:
            file.write(EXAMPLE)
        for model in served:
            try:
                spec = model.example(source, file_store.outputs / "example")
                check_models_first(spec)  # needs no torch, so a slip is answered at once
                check_job(settings, spec)
            except UsageError as error:
                raise UsageError(f"model `{model.name}`: {error}") from None
    finally:
        source.unlink(missing_ok=True)


def serving_settings(folder: Path) -> Settings:
    """The environment's settings; where no broker is set, everything is in the service's folder."""
    settings = load_settings()
    if not is_embedded(settings):
        return settings
    return load_settings(workspace=str(folder.absolute()))


def is_embedded(settings: Settings) -> bool:
    """Whether no other process could take the jobs."""
    return settings.broker_url.startswith("memory://")


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(
    service: Service,
    reconciler: Reconciler,
    settings: Settings,
    embedded: bool,
    host: str,
    port: int,
) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    import uvicorn

    from specbatch.jobs.serve.app import make_app
    from specbatch.jobs.serve.connections import server_config

    config = server_config(make_app(service), host, port)
    try:
        sock = config.bind_socket()
    except SystemExit:  # uvicorn's, whose log has the reason
        raise UsageError(
            f"port {port} of {host} cannot be listened on: stop what uses it, or give another "
            "--port"
        ) from None
    sock.listen()  # who connects from now on waits
    shown = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}/v1"
    # uvicorn raises its signals again once it has ended; what follows here must still be done.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with sock, _working(reconciler, settings, embedded):
        remark(f"serving {', '.join(service.models)} on {shown}")
        if service.page is not None:
            remark(f"jobs are shown on {shown.removesuffix('v1')}")
        try:
            uvicorn.Server(config).run(sockets=[sock])
        except KeyboardInterrupt:
            remark("stopping after the current step ...")


@contextmanager
def _working(reconciler: Reconciler, settings: Settings, embedded: bool) -> Iterator[None]:
    """The reconciler's thread and, embedded, the runner's process."""
    from specbatch.jobs.cli.serve_process import RunnerProcess

    runner = RunnerProcess(settings) if embedded else None
    reconciler.start()
    try:
        yield
    finally:
        reconciler.close()
        if runner is not None:
            runner.close()
