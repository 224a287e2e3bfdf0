"""Every error that a user can meet.

    SpecbatchError
    ├── UsageError               bad flags, bad settings                     exit 2
    │   ├── SpecError            a field of the job spec is wrong
    │   ├── InputError           an input file or column is missing or unreadable
    │   ├── ModelError           a model folder cannot be served
    │   │   ├── BrokenModelError    its files cannot be loaded: the worker ends
    │   │   └── ModelChangedError   they are not those that a job began with
    │   ├── OutputError          the output location holds another job, or is not writable
    │   ├── IdempotencyError     same key, different spec
    │   ├── OverBudgetError      a tenant's budget does not cover it
    │   ├── MissingExtraError    a part of the install is needed and absent
    │   └── JobNotFoundError     no such job
    ├── InUseError               another process works on it                  exit 2
    ├── WaitTimeoutError         the wait timed out; the job continues        exit 6
    ├── JobFailedError           a job that was waited for has no output      exit 4
    ├── StoreError               the database refused or is out of reach      exit 4
    │   └── UnknownKeyError      what it keeps is encrypted with a key that is not here
    ├── ObjectError              an object store refused, or gave back bad bytes
    ├── FencedError              a lease was lost: another worker owns the work now
    ├── SessionEndedError        a worker's session was ended in its absence
    ├── WorkerEndedError         a worker ended by itself                     exit 7
    │   └── BrokerLostError      it could take no messages for too long
    └── EngineError              the engine cannot continue
        ├── OutOfBlocksError     a sequence cannot fit the KV cache
        ├── NoEngineError        an engine could not be made, which may pass
        ├── DeviceLostError      the device is gone: the worker ends          exit 7
        │   ├── ModelLostError   its model cannot be loaded: the worker ends  exit 2
        │   └── StepHungError    a step does not end
        └── RequestCancelledError  the job was cancelled or the engine stopped

    KeyboardInterrupt
    └── JobInterrupted           a job was stopped here and can be resumed    exit 130
    UserWarning
    └── RowsFailedWarning        a job ended, and not all of its rows did well

A message is one sentence that names the problem and the remedy. Commands print it without a
traceback; any error that is not a `SpecbatchError` is a bug and keeps its traceback. This module
masks passwords in URLs, so that no error carries one into the store, a log or a terminal.
"""

from specbatch.schemas.masking import masked


def first_line(error: BaseException, most: int = 1000) -> str:
    """An error as part of a sentence, without the advice or quotes that libraries add."""
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    is_quoted = line[0] in "'\"" and line.count(line[0]) == 2 and line[0] == line[-1]
    return (line[1:-1] if is_quoted else line)[:most]


class SpecbatchError(Exception):
    """Base of all errors raised on purpose.

    `refused`: its place cannot be written because space or rights are missing.
    """

    exit_code = 4
    refused = False

    def __init__(self, *args: object) -> None:
        super().__init__(*(masked(arg) if isinstance(arg, str) else arg for arg in args))


class UsageError(SpecbatchError):
    """The request is wrong; nothing was started."""

    exit_code = 2


class SpecError(UsageError):
    """A field of the job spec is wrong; the message names it and what is allowed."""


class InputError(UsageError):
    """An input cannot be read as asked; the message names the file and the row group or column."""


class ModelError(UsageError):
    """A model cannot be served; the message names the folder and the reason."""


class BrokenModelError(ModelError):
    """The files of a model cannot be loaded here for any job.

    The worker releases its work and ends. No row is at fault, and another worker may have a good
    copy.
    """


class ModelChangedError(ModelError):
    """A model's files differ from those that a job started with; the message names what differs.

    Another worker may have the right files, so no attempt is counted.
    """


class OutputError(UsageError):
    """The output location cannot be used; the message names it."""


class InUseError(SpecbatchError):
    """Another process works on it; the message says what to wait for. Later it may be free."""

    exit_code = 2


class IdempotencyError(UsageError):
    """The idempotency key belongs to a different spec; the message names the difference.

    `job_id`: the job that has the key.
    """

    def __init__(self, message: str, *, job_id: str = "") -> None:
        super().__init__(message)
        self.job_id = job_id


class OverBudgetError(UsageError):
    """A tenant's budget does not cover what is asked for; the message names what is left."""


class MissingExtraError(UsageError):
    """A needed extra is not installed; the message gives the pip command."""


class JobNotFoundError(UsageError):
    """No job has this id."""


class WaitTimeoutError(SpecbatchError):
    """The wait ended before the job did. The job continues."""

    exit_code = 6


class JobFailedError(SpecbatchError):
    """The job failed, so there is no output; the message has its reason. `job_id`: the job."""

    def __init__(self, message: str, *, job_id: str = "") -> None:
        super().__init__(message)
        self.job_id = job_id


class JobInterrupted(KeyboardInterrupt):
    """Ctrl-C, or a cancelled task, stopped a job of this process; the message says how to resume
    it. `job_id`: the job.

    No `SpecbatchError`, so that whoever handles errors does not continue after Ctrl-C.
    """

    def __init__(self, message: str, *, job_id: str = "") -> None:
        super().__init__(message)
        self.job_id = job_id


class RowsFailedWarning(UserWarning):
    """Rows of a finished job have an error in place of a completion."""


class StoreError(SpecbatchError):
    """The database refused an operation or cannot be reached.

    `refused`: it cannot be written because space or rights are missing; no work is at fault.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class UnknownKeyError(StoreError):
    """The data is encrypted with a key that this process does not have."""


class ObjectError(SpecbatchError):
    """An object store refused an operation or returned bytes of the wrong size or checksum.

    `passing`: the store was out of reach or overloaded; the operation may succeed later.
    `refused`: the folder `place` cannot be written because space or rights are missing; no work is
    at fault.
    """

    def __init__(
        self, message: str, *, passing: bool = False, refused: bool = False, place: str = ""
    ) -> None:
        super().__init__(message)
        self.passing = passing
        self.refused = refused
        self.place = place


class FencedError(SpecbatchError):
    """The lease's fencing token is no longer current: another worker owns the work."""


class SessionEndedError(SpecbatchError):
    """The store ended the session of a silent worker, which starts another one."""


class WorkerEndedError(SpecbatchError):
    """A worker ended without being asked to and without losing a device. Its log says why."""

    exit_code = 7


class BrokerLostError(WorkerEndedError):
    """A worker failed to take messages from its broker in every attempt."""


class EngineError(SpecbatchError):
    """The engine cannot continue this request."""


class OutOfBlocksError(EngineError):
    """A sequence needs more KV blocks than the cache has."""


class NoEngineError(EngineError):
    """An engine could not be created because memory or storage failed. No row is at fault."""


class DeviceLostError(EngineError):
    """This process cannot compute any more. The worker releases its work and ends.

    `blameless`: the device or its driver failed by itself. Otherwise a kernel failed, perhaps
    because of its input. Then the attempt counts, or one group could end every worker in turn.
    """

    exit_code = 7

    def __init__(self, message: str, *, blameless: bool = True) -> None:
        super().__init__(message)
        self.blameless = blameless


class ModelLostError(DeviceLostError):
    """This worker's model cannot be loaded. A restarted worker would fail in the same way."""

    exit_code = 2


class StepHungError(DeviceLostError):
    """A step does not end, nor does its thread, so the process must not wait for it.

    The input may be the cause, so the attempt counts.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, blameless=False)


class RequestCancelledError(EngineError):
    """The request was cancelled, or the engine was closed during it."""
