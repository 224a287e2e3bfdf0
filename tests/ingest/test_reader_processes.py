"""The processes that read Parquet: few, soon there, a budget per file, and never left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ingest.making import make_spec

from specbatch.pipeline.inputs import columnar
from specbatch.pipeline.inputs.columnar import ColumnarSource
from specbatch.pipeline.inputs.contract import Source
from specbatch.pipeline.inputs.limited import KilledError, LimitedProcess, LimitError
from specbatch.pipeline.inputs.sources import open_source
from specbatch.pipeline.inputs.templates import ChatTemplate
from specbatch.pipeline.storage.objects import Objects
from support.peak_memory import below, children, ended

pytestmark = pytest.mark.pipeline  # starts processes

WAIT_SEC = 60.0
CHILD = "specbatch.pipeline.inputs.columnar_child"


def opened(uri: Path, memory_bytes: int = 768 << 20) -> ColumnarSource:
    source: Source = open_source(make_spec(uri).input, Objects(), memory_bytes)
    assert isinstance(source, ColumnarSource)
    return source


def write(path: Path, rows: int = 40, row_group: int = 10) -> Path:
    table = pa.table(
        {"id": [f"{i}" for i in range(rows)], "prompt": [f"p{i}" for i in range(rows)]}
    )
    pq.write_table(table, path, row_group_size=row_group)
    return path


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar, "ROWS_PER_BATCH", 3)


# --- few of them ------------------------------------------------------------------------------
def test_only_the_first_of_many_files_waits_for_python_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [write(tmp_path / f"{i}.parquet") for i in range(6)]
    list(opened(files[0]).read())
    started: list[object] = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(a) or popen(*a, **k))
    for file in files[1:]:
        source = opened(file)
        source.check()
        assert sum(len(batch.rows) for batch in source.read()) == 40
    assert not started


def test_one_process_reads_all_files_of_a_source_and_ends_with_it(tmp_path: Path) -> None:
    for i in range(6):
        write(tmp_path / f"{i}.parquet")
    list(opened(tmp_path).read())  # now there is a process to fork from
    before = below(os.getpid())
    source = opened(tmp_path)
    source.check()
    running = below(os.getpid()) - before
    assert len(running) == 1
    assert sum(len(batch.rows) for batch in source.read()) == 240
    assert below(os.getpid()) - before == running
    del source
    gc.collect()
    assert below(os.getpid()) == before


def test_no_file_is_left_open(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet")
    list(opened(file).read())
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        list(opened(file).read())
        next(opened(file).read())
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_reader_has_no_files_but_its_pipes(tmp_path: Path) -> None:
    before = below(os.getpid())
    sources = [opened(write(tmp_path / f"{i}.parquet")) for i in range(2)]
    new = below(os.getpid()) - before
    readers = [pid for pid in new if not children(pid)]
    assert len(readers) == len(sources)
    for pid in readers:
        names = {path.name for path in Path(f"/proc/{pid}/fd").iterdir()}
        assert names == {"0", "1", "2"}


# --- limits -----------------------------------------------------------------------------------
def test_each_file_has_the_whole_memory(tmp_path: Path) -> None:
    for i in range(4):
        cells = [bytes(np.random.default_rng(10 * i + k).integers(97, 122, 14 << 20, np.uint8))
                 for k in range(2)]  # fmt: skip
        table = pa.table({"id": [f"{i}-{k}" for k in range(2)], "prompt": pa.array(cells)})
        pq.write_table(table, tmp_path / f"{i}.parquet", use_dictionary=False)

    def all_good(memory_mib: int, uri: Path) -> bool:
        batches = opened(uri, memory_mib << 20).read()
        return all(row.problem is None for batch in batches for row in batch.rows)

    first = tmp_path / "0.parquet"
    least_mib = next(mib for mib in range(32, 400, 8) if all_good(mib, first))
    assert least_mib > 32
    assert all_good(least_mib + 8, tmp_path)


# --- ended from without -----------------------------------------------------------------------
@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("whom", ["reader", "its parent"])
def test_a_killed_process_costs_no_row(tmp_path: Path, whom: str) -> None:
    file = write(tmp_path / "a.parquet")
    before = below(os.getpid())
    source = opened(file)
    readers = [pid for pid in below(os.getpid()) - before if not children(pid)]
    (reader,) = readers
    rows = []
    for number, batch in enumerate(source.read()):
        rows += [(row.id, row.problem) for row in batch.rows]
        if number == 1:
            victim = reader if whom == "reader" else _parent(reader)
            gone = ended(victim)
            os.kill(victim, signal.SIGKILL)
            assert gone()
    assert rows == [(f"{i}", None) for i in range(40)]
    assert sum(len(batch.rows) for batch in opened(file).read()) == 40


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGSEGV, LimitError), (signal.SIGKILL, KilledError)]
)
def test_how_a_fork_ended_is_known(number: signal.Signals, kind: type[LimitError]) -> None:
    before = below(os.getpid())
    process = LimitedProcess.fork(CHILD)
    process.send(b'{"do": "close"}\n')
    process.exactly(9)
    (pid,) = (pid for pid in below(os.getpid()) - before if not children(pid))
    os.kill(pid, number)
    with pytest.raises(LimitError) as caught:
        process.exactly(1 << 20)
    assert type(caught.value) is kind


PROGRAM = """
import os, signal, sys
from ingest.test_reader_processes import opened
from support.peak_memory import below
from pathlib import Path
rows = opened(Path(sys.argv[1])).read()
next(rows)
print(*below(os.getpid()), flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("how", ["killed", "at its end"])
@pytest.mark.parametrize("frozen", [False, True], ids=["running", "frozen"])
def test_none_outlives_its_worker(tmp_path: Path, how: str, frozen: bool) -> None:
    file = write(tmp_path / "a.parquet")
    worker = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])},
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    with worker.stdin, worker.stdout:
        pids = [int(pid) for pid in worker.stdout.readline().split()]
        assert len(pids) == 2
        gone = [ended(pid) for pid in pids]
        if frozen:
            os.kill(next(pid for pid in pids if not children(pid)), signal.SIGSTOP)
        if how == "killed":
            worker.kill()
        else:
            worker.stdin.write(b"\n")
            worker.stdin.flush()
        assert worker.wait(WAIT_SEC) == (-signal.SIGKILL if how == "killed" else 0)
    assert all(has_ended() for has_ended in gone)


FORKING = """
import gc, os, sys
from ingest.test_reader_processes import opened
from pathlib import Path
rows = opened(Path(sys.argv[1])).read()
count = len(next(rows).rows)
if os.fork() == 0:
    del rows
    gc.collect()
    again = sum(len(batch.rows) for batch in opened(Path(sys.argv[1])).read())
    sys.exit(again != 40)
assert os.wait()[1] == 0
assert count + sum(len(batch.rows) for batch in rows) == 40
"""


def test_a_copy_of_the_worker_leaves_its_readers_alone(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet")
    path = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-c", FORKING, str(file)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_SEC,
    )
    assert done.returncode == 0, done.stderr


# --- pausing ----------------------------------------------------------------------------------
@pytest.mark.usefixtures("small_batches")
def test_a_paused_reading_has_no_process_and_misses_no_row(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", row_group=25)
    plain = opened(file)
    before = below(os.getpid())
    source = opened(file)
    ids = []
    for batch in source.read():
        ids += [row.id for row in batch.rows]
        source.pause()
        assert below(os.getpid()) <= before
    assert ids == [row.id for batch in plain.read() for row in batch.rows]


@pytest.mark.parametrize("whom", ["renderer", "its parent"])
def test_a_killed_renderer_costs_no_chat(whom: str) -> None:
    template = ChatTemplate("{{ messages[0]['content'] }}", {}, "m")
    before = below(os.getpid())
    for number in range(4):
        hello = f"hello {number}"
        assert template.render([{"role": "user", "content": hello}], today=0.0) == hello
        (renderer,) = (pid for pid in below(os.getpid()) - before if not children(pid))
        victim = renderer if whom == "renderer" else _parent(renderer)
        gone = ended(victim)
        os.kill(victim, signal.SIGKILL)
        assert gone()


def test_an_interrupted_render_does_not_answer_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = ChatTemplate("{{ messages[0]['content'] }}", {}, "m")
    assert template.render([{"role": "user", "content": "first"}], today=0.0) == "first"

    def interrupted(_: LimitedProcess) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(LimitedProcess, "line", interrupted)
        with pytest.raises(KeyboardInterrupt):
            template.render([{"role": "user", "content": "second"}], today=0.0)
    assert template.render([{"role": "user", "content": "third"}], today=0.0) == "third"


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati"])
def test_a_template_writes_the_day_it_is_given(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock and time zone of its machine, a retry would write another prompt."""
    monkeypatch.setenv("TZ", zone)
    template = ChatTemplate("{{ strftime_now('%d %b %Y, %H:%M') }}", {}, "m")
    chat = [{"role": "user", "content": "hello"}]
    assert template.render(chat, today=1e9) == "09 Sep 2001, 01:46"
    assert template.render(chat, today=2e9) == "18 May 2033, 03:33"


def test_a_template_nobody_needs_ends_its_process() -> None:
    before = below(os.getpid())
    template = ChatTemplate("{{ messages[0]['content'] }}", {}, "m")
    assert template.render([{"role": "user", "content": "hello"}], today=0.0) == "hello"
    (pid,) = (pid for pid in below(os.getpid()) - before if not children(pid))
    del template
    gc.collect()
    assert not Path(f"/proc/{pid}").exists(), "it has ended, and its parent has taken note"
