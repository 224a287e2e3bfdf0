"""`hf://`, through huggingface_hub.

A file's version is the digest by which its repository knows it. It is read at the commit where it
was found, so commits to other files of the repository change nothing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeGuard

from specbatch.pipeline.storage.remote_contract import Found, VersionGoneError
from specbatch.schemas.errors import ObjectError

if TYPE_CHECKING:
    from huggingface_hub import HfApi, RepoFile
    from huggingface_hub.utils import HfUri

ANSWER_SEC = 60.0
_PART = 206


class HubRemote:
    """Thread-safe; huggingface_hub makes its connections anew after a fork."""

    name = "the Hugging Face Hub"
    remedy = "set HF_TOKEN to a token that may read the repository"

    def __init__(self) -> None:
        self._commits: dict[tuple[str, str], str] = {}  # by uri and version: one that has it

    def look(self, uri: str) -> Found | None:
        place = _parsed(uri)
        if not place.path_in_repo:
            return None
        api, commit = _api(), self._commit(uri, place)
        paths = api.get_paths_info(
            place.id, [place.path_in_repo], revision=commit, repo_type=place.type
        )
        files = [one for one in paths if _is_file(one)]
        return self._found(uri, commit, files[0]) if files else None

    def find(self, folder: str) -> dict[str, Found]:
        from huggingface_hub.errors import RemoteEntryNotFoundError

        place = _parsed(folder)
        root = folder.rstrip("/").removesuffix(place.path_in_repo).rstrip("/")
        api, commit = _api(), self._commit(folder, place)
        tree = api.list_repo_tree(
            place.id,
            place.path_in_repo or None,
            recursive=True,
            revision=commit,
            repo_type=place.type,
        )
        try:
            return {
                (uri := f"{root}/{one.path}"): self._found(uri, commit, one)
                for one in tree
                if _is_file(one)
            }
        except RemoteEntryNotFoundError:
            return {}

    def read(self, uri: str, found: Found, start: int, size: int) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        if (uri, found.version) not in self._commits:
            self.look(uri)
        commit = self._commits.get((uri, found.version))
        if commit is None:
            raise VersionGoneError
        place = _parsed(uri)
        url = hf_hub_url(
            place.id,
            place.path_in_repo,
            revision=commit,
            repo_type=place.type,
            endpoint=_endpoint(),
        )
        headers = build_hf_headers() | {
            "Accept-Encoding": "identity",  # a range of compressed bytes would be another range
            "Range": f"bytes={start}-{start + size - 1}",
        }
        with get_session().stream(
            "GET", url, headers=headers, timeout=ANSWER_SEC, follow_redirects=True
        ) as answer:
            hf_raise_for_status(answer)
            data = answer.read() if answer.status_code == _PART else b""
        if len(data) != size:
            raise ObjectError(
                f"cannot read {uri}: the Hub sent other bytes than were asked for; a proxy on the "
                "way may change answers"
            )
        return data

    def _commit(self, uri: str, place: HfUri) -> str:
        """The commit that a branch, a tag or the default branch is at now."""
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        try:
            info = _api().repo_info(place.id, revision=place.revision, repo_type=place.type)
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            raise ObjectError(
                f"cannot read {uri}: the Hugging Face Hub has no such repository or revision, or "
                "keeps it from you; set HF_TOKEN to a token that may read it"
            ) from error
        return str(info.sha)

    def _found(self, uri: str, commit: str, file: RepoFile) -> Found:
        found = Found(file.size, file.lfs.sha256 if file.lfs is not None else file.blob_id)
        self._commits[uri, found.version] = commit
        return found


def _api() -> HfApi:
    from huggingface_hub import HfApi

    return HfApi(endpoint=_endpoint())


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT")


def _parsed(uri: str) -> HfUri:
    from huggingface_hub.errors import HfUriError
    from huggingface_hub.utils import parse_hf_uri

    try:
        place = parse_hf_uri(uri)
    except HfUriError as error:
        raise ObjectError(
            f"{uri} names no repository: it looks like hf://datasets/OWNER/NAME/FILE"
        ) from error
    if place.is_bucket:
        raise ObjectError(f"cannot read {uri}: buckets of the Hub are not read; use a repository")
    return place


def _is_file(one: object) -> TypeGuard[RepoFile]:
    from huggingface_hub import RepoFile

    return isinstance(one, RepoFile)
