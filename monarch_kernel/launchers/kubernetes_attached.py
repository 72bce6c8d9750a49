"""Pods of others: by which labels a mesh takes them as hosts, and which are free. Plain data, no I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from monarch_kernel.launchers.base import InfeasibleError
from monarch_kernel.launchers.kubernetes_pods import SeenPod
from monarch_kernel.launchers.kubernetes_sets import ORDER


class TakenPod(msgspec.Struct, frozen=True):
    """A host in a Pod of others.

    Attributes:
        host: its number.
        pod: its name.
        selector: the labels by which it was found.
        container: that it is; "": none ran yet.
    """

    host: int
    pod: str
    selector: str
    container: str = ""


class AttachedLabels:
    """The labels of Pods of others, and the label by which those are numbered: for all meshes, or by their names.

    Args:
        attach_to: as ``KubernetesLauncher`` has it.
        order_label: the same.
    """

    def __init__(self, attach_to: str | Mapping[str, str], order_label: str | Mapping[str, str]) -> None:
        self.attach_to = attach_to if isinstance(attach_to, str) else dict(attach_to)
        self.order_label = order_label if isinstance(order_label, str) else dict(order_label)

    def words(self) -> str:
        """All of them; "": the Pods of all meshes are made."""
        found = [self.attach_to] if isinstance(self.attach_to, str) else list(self.attach_to.values())
        return "; ".join(f"Pods with the labels {each}" for each in found if each)

    def selector(self, mesh: str) -> str:
        """The labels of the Pods of a mesh; "": its Pods are made."""
        return self.attach_to if isinstance(self.attach_to, str) else self.attach_to.get(mesh, "")

    def order(self, mesh: str) -> str:
        """The label by which these are numbered."""
        return self.order_label if isinstance(self.order_label, str) else self.order_label.get(mesh, ORDER)

    def choose(
        self,
        wanted: Mapping[int, str],
        found: Mapping[str, Iterable[SeenPod]],
        before: Sequence[TakenPod],
        own: Collection[str],
        namespace: str,
    ) -> list[TakenPod]:
        """Pods in which no host of the job lives.

        Args:
            wanted: the mesh of each further host, by its number.
            found: the Pods with the labels of these meshes, by these.
            before: those that the job has taken so far.
            own: the names of Pods that were made for the job.
            namespace: of all of them.

        Raises:
            InfeasibleError: there are too few.
        """
        used = {(each.pod, each.container) for each in before}
        taken = {*own, *(each.pod for each in before if not each.container)}
        chosen: list[TakenPod] = []
        for mesh in dict.fromkeys(wanted.values()):
            selector, order = self.selector(mesh), self.order(mesh)
            free = [pod for pod in found[selector] if not pod.leaving and not pod.over and pod.name not in taken]
            free = sorted(
                (pod for pod in free if (pod.name, pod.container_id) not in used), key=lambda pod: _number(pod, order)
            )
            numbers = [number for number in wanted if wanted[number] == mesh]
            if len(free) < len(numbers):
                raise InfeasibleError(
                    f"{len(numbers)} hosts were asked for, and {len(free)} Pods in the namespace {namespace} have the "
                    f"labels {selector} and are free: ask for fewer, or have more Pods started"
                )
            for number, pod in zip(numbers, free):
                # The container after one that has ended is the one that comes.
                chosen.append(TakenPod(number, pod.name, selector, "" if pod.ended else pod.container_id))
                taken.add(pod.name)
        return chosen


def _number(pod: SeenPod, label: str) -> tuple[float, str]:
    number = pod.labels.get(label, "")
    return (float(number) if number.isdigit() else float("inf"), pod.name)
