"""All exceptions of monarch_kernel that a program may encounter, and the records of failed calls on meshes.

This module only exports names. Exceptions that calls do not raise are loaded on first use, because few programs need
them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from monarch_kernel.environment import InvalidSettingError
from monarch_kernel.protocol.faults import Fault, capture, label_files
from monarch_kernel.protocol.refs import Death, DeathKind
from monarch_kernel.runtime.actor.errors import (
    ActorError,
    MeshFailure,
    RankFailure,
    SupervisionError,
    build_actor_error,
)
from monarch_kernel.runtime.mesh.shape import UnknownDimensionError

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.viewers import DriverError
    from monarch_kernel.debugger.model.stops import NotSteppable
    from monarch_kernel.debugger.reports.job_report import ReportError
    from monarch_kernel.engines.interface import InterruptedEndpoint, NotOffered
    from monarch_kernel.engines.join.announcements import JoinError
    from monarch_kernel.kernel.install import InstallError
    from monarch_kernel.kernel.output.cell_errors import CellSyntaxError, MeshCellError, MeshCellInterrupt
    from monarch_kernel.launchers.base import (
        InfeasibleError,
        LaunchError,
        StartFailedError,
        StartTimeoutError,
        SubmissionRefusedError,
    )
    from monarch_kernel.numerics.bisection import BisectionError
    from monarch_kernel.numerics.collectives import CollectivesError
    from monarch_kernel.numerics.comparison import AlignmentError
    from monarch_kernel.numerics.control import NumericsError
    from monarch_kernel.numerics.observer import StopRun
    from monarch_kernel.numerics.reference import ReferenceRunError
    from monarch_kernel.numerics.step_capture import CaptureError
    from monarch_kernel.numerics.step_replay import CollectiveMismatchError, ReplayError
    from monarch_kernel.pool.pool_executor import TaskInterrupted
    from monarch_kernel.protocol.keys.guarded_files import KeyFileError, KeyFileExistsError
    from monarch_kernel.protocol.private_files import NotOursError, NotPrivateError
    from monarch_kernel.protocol.worker_addresses import AddressError
    from monarch_kernel.runtime.actor.healing.healed import HealError
    from monarch_kernel.runtime.actor.hosts.attachment import AttachTimeoutError
    from monarch_kernel.runtime.actor.kept.kept_host import KeptError
    from monarch_kernel.runtime.host.devices import DeviceError
    from monarch_kernel.runtime.tensor.controller.errors import (
        BorrowError,
        DeviceMeshError,
        MixedTensorsError,
        NonFiniteError,
        RanksDifferWarning,
        RemoteException,
    )
    from monarch_kernel.runtime.tensor.sharded.controller.sharded_world import FallbackWarning
    from monarch_kernel.runtime.transfer.backend_settings import (
        RDMAReadTransferWarning,
        RDMATcpFallbackWarning,
        RDMAWriteTransferWarning,
    )
    from monarch_kernel.runtime.transfer.errors import RDMAError, RDMATimeoutError
    from monarch_kernel.watch.history.query import HistoryQueryError
    from workspace_sync.model.errors import (
        IncompatibleError,
        MountError,
        ScanError,
        StoreError,
        SyncError,
        TamperedError,
        WorkspaceBusyError,
    )

__all__ = [
    "ActorError",
    "AddressError",
    "AlignmentError",
    "AttachTimeoutError",
    "BisectionError",
    "BorrowError",
    "CaptureError",
    "CellSyntaxError",
    "CollectiveMismatchError",
    "CollectivesError",
    "Death",
    "DeathKind",
    "DeviceError",
    "DeviceMeshError",
    "DriverError",
    "FallbackWarning",
    "Fault",
    "HealError",
    "HistoryQueryError",
    "IncompatibleError",
    "InfeasibleError",
    "InstallError",
    "InterruptedEndpoint",
    "InvalidSettingError",
    "JoinError",
    "KeptError",
    "KeyFileError",
    "KeyFileExistsError",
    "LaunchError",
    "MeshCellError",
    "MeshCellInterrupt",
    "MeshFailure",
    "MixedTensorsError",
    "MountError",
    "NonFiniteError",
    "NotOffered",
    "NotOursError",
    "NotPrivateError",
    "NotSteppable",
    "NumericsError",
    "RDMAError",
    "RDMAReadTransferWarning",
    "RDMATcpFallbackWarning",
    "RDMATimeoutError",
    "RDMAWriteTransferWarning",
    "RankFailure",
    "RanksDifferWarning",
    "ReferenceRunError",
    "RemoteException",
    "ReplayError",
    "ReportError",
    "ScanError",
    "StartFailedError",
    "StartTimeoutError",
    "StopRun",
    "StoreError",
    "SubmissionRefusedError",
    "SupervisionError",
    "SyncError",
    "TamperedError",
    "TaskInterrupted",
    "UnknownDimensionError",
    "WorkspaceBusyError",
    "build_actor_error",
    "capture",
    "label_files",
]

_LOADED_AT_FIRST_USE = {
    name: module
    for module, names in {
        "monarch_kernel.debugger.controller.viewers": "DriverError",
        "monarch_kernel.debugger.model.stops": "NotSteppable",
        "monarch_kernel.debugger.reports.job_report": "ReportError",
        "monarch_kernel.engines.interface": "InterruptedEndpoint NotOffered",
        "monarch_kernel.engines.join.announcements": "JoinError",
        "monarch_kernel.kernel.install": "InstallError",
        "monarch_kernel.kernel.output.cell_errors": "CellSyntaxError MeshCellError MeshCellInterrupt",
        "monarch_kernel.launchers.base": "InfeasibleError LaunchError StartFailedError StartTimeoutError "
        "SubmissionRefusedError",
        "monarch_kernel.numerics.bisection": "BisectionError",
        "monarch_kernel.numerics.collectives": "CollectivesError",
        "monarch_kernel.numerics.comparison": "AlignmentError",
        "monarch_kernel.numerics.control": "NumericsError",
        "monarch_kernel.numerics.observer": "StopRun",
        "monarch_kernel.numerics.reference": "ReferenceRunError",
        "monarch_kernel.numerics.step_capture": "CaptureError",
        "monarch_kernel.numerics.step_replay": "CollectiveMismatchError ReplayError",
        "monarch_kernel.pool.pool_executor": "TaskInterrupted",
        "monarch_kernel.protocol.keys.guarded_files": "KeyFileError KeyFileExistsError",
        "monarch_kernel.protocol.private_files": "NotOursError NotPrivateError",
        "monarch_kernel.protocol.worker_addresses": "AddressError",
        "monarch_kernel.runtime.actor.healing.healed": "HealError",
        "monarch_kernel.runtime.actor.hosts.attachment": "AttachTimeoutError",
        "monarch_kernel.runtime.actor.kept.kept_host": "KeptError",
        "monarch_kernel.runtime.host.devices": "DeviceError",
        "monarch_kernel.runtime.tensor.controller.errors": "BorrowError DeviceMeshError MixedTensorsError "
        "NonFiniteError RanksDifferWarning RemoteException",
        "monarch_kernel.runtime.tensor.sharded.controller.sharded_world": "FallbackWarning",
        "monarch_kernel.runtime.transfer.backend_settings": "RDMAReadTransferWarning RDMATcpFallbackWarning "
        "RDMAWriteTransferWarning",
        "monarch_kernel.runtime.transfer.errors": "RDMAError RDMATimeoutError",
        "monarch_kernel.watch.history.query": "HistoryQueryError",
        "workspace_sync.model.errors": "IncompatibleError MountError ScanError StoreError SyncError "
        "TamperedError WorkspaceBusyError",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    module = _LOADED_AT_FIRST_USE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(module), name)
    return found
