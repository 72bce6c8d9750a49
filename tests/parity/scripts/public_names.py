"""Public names that programs import; each is in torchmonarch 0.7.0."""

import importlib

from monarch.config import get_global_config
from monarch.tools.config import Config
from monarch.tools.network import AddrType, get_ipaddr, get_sockaddr
from report import show

WANTED = {
    "monarch": "Future coalescing configure configured get_global_config get_runtime_config clear_runtime_config "
    "function_resolvers world_mesh fetch_shard inspect show remote reduce reduce_ to_mesh slice_mesh "
    "Simulator set_meta",
    "monarch.actor.concurrent": "concurrent_endpoint",
    "monarch.config": "Encoding configure configured parametrize_config parametrize_config_pointwise",
    "monarch.fetch": "call_on_shard_and_fetch fetch_shard inspect show",
    "monarch.job": "DEFAULT_JOB_PATH exec_command hosts_from_config load_current_job set_current_job shell "
    "SERVICE_PROC_IDS_ENV SERVICE_PROC_RANK_ENV new_service_proc_id service_proc_addrs",
    "monarch.memory": "dump_memory_snapshot record_memory_history",
    "monarch.profiler": "Schedule profile record_function",
    "monarch.rdma": "RDMAReadTransferWarning RDMAWriteTransferWarning RDMATcpFallbackWarning",
    "monarch.simulator.config": "set_meta",
    "monarch.timer": "ExecutionTimer execution_timer_start get_latest_timer_measurement",
    "monarch.tools": "commands network utils colors config",
    "monarch.tools.config": "Config NOT_SET",
    "monarch.tools.network": "AddrType get_ipaddr get_sockaddr",
    "monarch.tools.utils": "MONARCH_HOME conda",
}
for module, names in WANTED.items():
    found = importlib.import_module(module)
    for name in names.split():
        try:
            there = hasattr(found, name) or bool(importlib.import_module(f"{module}.{name}"))
        except ImportError:
            there = False
        show(module, name, there)

show("settings", *sorted(get_global_config()))
show(
    "network",
    get_sockaddr("127.0.0.1", 80),
    get_ipaddr("127.0.0.1", 1, AddrType.IPv4),
    get_ipaddr("::1", 1),
    get_sockaddr("::1", 1),
)
try:
    get_sockaddr("nothing.invalid", 80)
except RuntimeError as e:
    show("unresolved", e)
show("config", Config().scheduler, Config().dryrun, Config(scheduler="slurm", scheduler_args={"a": 1}).scheduler_args)
