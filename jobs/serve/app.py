"""The routes: an OpenAI-compatible Files and Batches service.

They check who asks and hand over; files, batches and keys have files of their own. Routes without
`async` run in a pool of threads, as the store's calls block.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import uuid4

from fastapi import Depends, FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from specbatch.jobs.serve.batches import BatchView, file_json, list_json, new_batch
from specbatch.jobs.serve.errors import ApiError, logged, unknown, wrong
from specbatch.jobs.serve.file_store import BATCH, FILE, checked
from specbatch.jobs.serve.guard import KNOWN, Guard
from specbatch.jobs.serve.keys import Caller, caller_of
from specbatch.jobs.serve.page import add_page
from specbatch.jobs.serve.partial import partial_lines
from specbatch.jobs.serve.reconciler import CANCELLED
from specbatch.jobs.serve.service import Service
from specbatch.jobs.serve.uploads import Upload, in_time, limited, too_large
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.outputs.names import OPENAI
from specbatch.schemas.errors import InUseError, JobNotFoundError, SpecbatchError, StoreError
from specbatch.schemas.openai_formats import URLS
from specbatch.schemas.records import JobRow
from specbatch.schemas.serving import BatchRow, Page, Purpose, Scope, StoredFile

log = logging.getLogger(__name__)

MOST_BODY_BYTES = 64 << 10  # of a JSON body
FORM_BYTES = 64 << 10  # of a form beside its file
MOST_FILES, MOST_BATCHES = 10_000, 100  # of a page, as OpenAI has it
ANSWERED_AT_ONCE = (*URLS.values(), "/v1/responses")  # by a service of OpenAI's, not here
LINES_TYPE = "application/x-ndjson"
FILE_TYPE = "application/octet-stream"
_LOCAL = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?")


def make_app(service: Service) -> Guard:
    """The ASGI application. It starts nothing and closes nothing."""
    app = FastAPI(
        title="specbatch", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    _answer_errors(app)
    reader, writer = _caller(service, Scope.READ), _caller(service, Scope.WRITE)
    _add_files(app, service, reader, writer)
    _add_batches(app, service, reader, writer)
    _add_models(app, service, reader)
    if service.page is not None:
        add_page(app, service, service.page)
    return Guard(app)  # also around the answer to what no route and no middleware expected


def _caller(service: Service, scope: Scope) -> Any:
    def caller(
        request: Request,
        authorization: Annotated[str | None, Header()] = None,
        origin: Annotated[str | None, Header()] = None,
        host: Annotated[str, Header()] = "",
    ) -> Caller:
        if service.with_keys:
            found = caller_of(service.store, authorization)
        elif origin is not None or _LOCAL.fullmatch(host) is None:
            # Otherwise any page in a browser on this machine could send requests, also one whose
            # name leads to this address.
            raise ApiError(403, "a service without API keys takes no requests of web pages")
        else:
            found = Caller("default")
        if service.rates is not None:  # also of what the key may not do: it costs as much
            service.rates.check(found.key_id)
        found.must(scope)
        setattr(request.state, KNOWN, True)
        return found

    return Depends(caller)


# --- files ----------------------------------------------------------------------------------------
def _add_files(app: FastAPI, service: Service, reader: Any, writer: Any) -> None:
    store, file_store = service.store, service.file_store

    @app.post("/v1/files")
    async def create_file(request: Request, caller: Caller = writer) -> JSONResponse:
        file = await _receive(service, request, caller.tenant)
        with suppress(OSError):  # the next start takes the mark away
            file_store.unmark(file.file_id)
        return JSONResponse(file_json(file))

    @app.get("/v1/files")
    def list_files(
        caller: Caller = reader,
        limit: Annotated[int, Query(ge=1, le=MOST_FILES)] = MOST_FILES,
        after: str | None = None,
        order: Literal["asc", "desc"] = "desc",
        purpose: Purpose | None = None,
    ) -> JSONResponse:
        page = Page(limit + 1, checked(FILE, after) if after else None, order == "desc")
        found = store.files(caller.tenant, page, purpose)
        return JSONResponse(list_json([file_json(f) for f in found[:limit]], len(found) > limit))

    @app.get("/v1/files/{file_id}")
    def retrieve_file(file_id: str, caller: Caller = reader) -> JSONResponse:
        return JSONResponse(file_json(_file(service, caller, file_id)))

    @app.get("/v1/files/{file_id}/content")
    def file_content(file_id: str, caller: Caller = reader) -> Response:
        path = file_store.path_of(_file(service, caller, file_id).file_id)
        if not path.exists():
            raise _not_here(file_id)
        return FileResponse(path, media_type=FILE_TYPE)

    @app.delete("/v1/files/{file_id}")
    def delete_file(file_id: str, caller: Caller = writer) -> JSONResponse:
        if _file(service, caller, file_id).service_id != file_store.service_id:
            raise _not_here(file_id)  # else its row would go, and its bytes stay for good
        copy = _copy_of(service, caller, file_id)
        with suppress(OSError):  # a full disk must not keep files from being deleted
            file_store.mark(file_id, copy)
        try:
            found = store.delete_file(caller.tenant, file_id)
        except InUseError:
            file_store.unmark(file_id)
            raise
        file_store.remove(file_id, copy)
        if not found:
            raise unknown("file", file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})


async def _receive(service: Service, request: Request, tenant: str) -> StoredFile:
    said = request.headers.get("content-length", "")
    most = service.most_file_bytes
    if said.isdecimal() and int(said) > most + FORM_BYTES:
        raise too_large(most)
    upload = Upload(service.file_store.uploads / uuid4().hex, service.file_store.access, most)
    upload.begin(request.headers.get("content-type", ""))
    try:
        chunks = limited(request.stream(), most + FORM_BYTES, "the form")
        async for chunk in in_time(chunks, service.silence_sec):
            await run_in_threadpool(upload.feed, chunk)
        return await run_in_threadpool(_finish, service, upload, tenant)
    except OSError as error:
        log.warning("a file could not be taken: %s", error)
        raise ApiError(507, "the service cannot store the file now", "storage_full") from None
    finally:
        with suppress(OSError):  # what is still buffered
            await run_in_threadpool(upload.close)


def _finish(service: Service, upload: Upload, tenant: str) -> StoredFile:
    file = upload.finish(service.file_store, tenant, service.privacy)
    try:
        return service.store.add_file(file)
    except StoreError:  # its row may be there all the same, and needs the bytes
        found = service.store.file(tenant, file.file_id)
        if found is None:
            service.file_store.remove(file.file_id)
            raise
        return found


def _file(service: Service, caller: Caller, file_id: str) -> StoredFile:
    found = service.store.file(caller.tenant, checked(FILE, file_id))
    if found is None:
        raise unknown("file", file_id)
    return found


def _copy_of(service: Service, caller: Caller, file_id: str) -> Path | None:
    """Of a file that a batch made: its job has published the same lines."""
    maker = service.store.batch_of_file(caller.tenant, file_id)
    if maker is None:
        return None
    output, errors = OPENAI
    name = output if file_id == maker.output_file_id else errors
    return service.file_store.output_of(maker.batch_id) / name


def _not_here(file_id: str) -> ApiError:
    said = f"the content of file {file_id} is not in this service's folder: ask the operator"
    return ApiError(404, said, "content_missing")


# --- batches --------------------------------------------------------------------------------------
def _add_batches(app: FastAPI, service: Service, reader: Any, writer: Any) -> None:
    store = service.store

    @app.post("/v1/batches")
    async def create_batch(
        request: Request,
        caller: Caller = writer,
        idempotency_key: Annotated[str | None, Header()] = None,
    ) -> JSONResponse:
        chunks = limited(request.stream(), MOST_BODY_BYTES, "the body")
        body = b"".join([chunk async for chunk in in_time(chunks, service.silence_sec)])
        more = service.file_store.service_id, service.privacy
        order = new_batch(body, caller.tenant, idempotency_key, *more)
        batch, is_new = await run_in_threadpool(store.add_batch, order, service.most_open)
        if is_new:
            service.wake()
        return JSONResponse(await run_in_threadpool(_shown, service, batch))

    @app.get("/v1/batches")
    def list_batches(
        caller: Caller = reader,
        limit: Annotated[int, Query(ge=1, le=MOST_BATCHES)] = 20,
        after: str | None = None,
    ) -> JSONResponse:
        page = Page(limit + 1, checked(BATCH, after) if after else None)
        found = store.batches(caller.tenant, page)
        return JSONResponse(list_json(_listed(store, found[:limit]), len(found) > limit))

    @app.get("/v1/batches/{batch_id}")
    def retrieve_batch(batch_id: str, caller: Caller = reader) -> JSONResponse:
        return JSONResponse(_shown(service, _batch(service, caller, batch_id)))

    @app.post("/v1/batches/{batch_id}/cancel")
    def cancel_batch(batch_id: str, caller: Caller = writer) -> JSONResponse:
        batch = store.cancel_batch(caller.tenant, checked(BATCH, batch_id))
        if batch is None:
            raise unknown("batch", batch_id)
        if batch.status is None and batch.job_id is not None:
            service.client.cancel(batch.job_id, CANCELLED)
        service.wake()
        return JSONResponse(_shown(service, batch))

    @app.get("/v1/batches/{batch_id}/results")
    def results_so_far(batch_id: str, caller: Caller = reader) -> Response:
        batch = _batch(service, caller, batch_id)
        job = _job(service, batch)
        lines = iter(()) if job is None else partial_lines(store, batch, job)
        return StreamingResponse(lines, media_type=LINES_TYPE)


def _batch(service: Service, caller: Caller, batch_id: str) -> BatchRow:
    found = service.store.batch(caller.tenant, checked(BATCH, batch_id))
    if found is None:
        raise unknown("batch", batch_id)
    return found


def _job(service: Service, batch: BatchRow) -> JobRow | None:
    if batch.job_id is None:
        return None
    try:
        return service.store.get_job(batch.job_id)
    except JobNotFoundError:
        return None


def _listed(store: Store, batches: Sequence[BatchRow]) -> list[dict[str, Any]]:
    """Without what only the job's figures say of an ended batch. Few statements for all."""
    going = [batch.job_id for batch in batches if batch.status is None and batch.job_id is not None]
    jobs, progress = store.jobs_of_ids(going), store.progress_of(going)
    of_them = [(batch, batch.job_id or "") for batch in batches]
    return [BatchView(one, jobs.get(name), progress.get(name)).as_json() for one, name in of_them]


def _shown(service: Service, batch: BatchRow) -> dict[str, Any]:
    job = _job(service, batch)
    progress = None if job is None else service.store.progress(job.job_id)
    return BatchView(batch, job, progress).as_json()


# --- models ---------------------------------------------------------------------------------------
def _add_models(app: FastAPI, service: Service, reader: Any) -> None:
    def shown(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": service.since, "owned_by": "specbatch"}

    @app.get("/v1/models")
    def list_models(_caller: Caller = reader) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [shown(name) for name in service.models]})

    @app.get("/v1/models/{name:path}")
    def retrieve_model(name: str, _caller: Caller = reader) -> JSONResponse:
        if name not in service.models:
            raise unknown("model", name)
        return JSONResponse(shown(name))


# --- errors ---------------------------------------------------------------------------------------
def _answer_errors(app: FastAPI) -> None:
    @app.exception_handler(SpecbatchError)
    def ours(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, SpecbatchError), "registered for it"
        return _answer(logged(error))

    @app.exception_handler(RequestValidationError)
    def wrong_parameter(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError), "registered for it"
        problem = error.errors()[0]
        name = str(problem["loc"][-1])
        return _answer(wrong(name, f"`{name}` {_said(problem)}"))

    @app.exception_handler(HTTPException)
    def no_route(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException), "registered for it"
        what = f"{request.method} {request.url.path[:100]}"
        said = {404: f"there is no {what}{_hint(request)}", 405: f"{what} is not supported"}
        return _answer(ApiError(error.status_code, said.get(error.status_code, error.detail)))

    @app.exception_handler(Exception)
    def a_bug(_request: Request, _error: Exception) -> JSONResponse:
        return _answer(ApiError(500, "the service failed: its log says why"))


def _hint(request: Request) -> str:
    """What who asks for a route that there is not may have meant."""
    path = request.url.path
    if request.method == "POST" and path in ANSWERED_AT_ONCE:
        return ": this service does batches: upload a file, then POST /v1/batches"
    return "" if path.startswith("/v1/") else ": base_url ends in /v1"


def _said(problem: Mapping[str, Any]) -> str:
    """What is wrong with a parameter, as we say it."""
    of_it = problem.get("ctx", {})
    match problem["type"]:
        case "int_parsing":
            return "must be a whole number"
        case "greater_than_equal":
            return f"must be at least {of_it['ge']}"
        case "less_than_equal":
            return f"must be at most {of_it['le']}"
        case "literal_error" | "enum":
            return f"must be one of {of_it['expected']}"
    return f"is wrong: {problem['msg']}"


def _answer(error: ApiError) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    return JSONResponse(error.body, error.status, headers)
