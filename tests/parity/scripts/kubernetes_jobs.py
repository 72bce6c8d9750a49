"""How jobs on Kubernetes are declared. No cluster is asked."""

import inspect
import pathlib

from monarch.job.kubernetes import ImageSpec, KubeConfig, KubernetesJob
from report import raises, show

show(KubeConfig(), KubeConfig().out_of_cluster, KubeConfig().local, KubeConfig().remote)
path = KubeConfig.from_path("/nowhere/config")
show(path.local, path.out_of_cluster, path == KubeConfig(local=pathlib.Path("/nowhere/config")))
show(KubeConfig.from_path("~/config").local == pathlib.Path("~/config").expanduser())
raises("no account", RuntimeError, KubeConfig().load)
raises("no file", RuntimeError, path.load)
show(list(inspect.signature(KubeConfig).parameters))
show(list(inspect.signature(ImageSpec).parameters))
show(list(inspect.signature(KubernetesJob.add_mesh).parameters)[:10])

for config in (None, KubeConfig(), path):
    KubernetesJob("tests", kubeconfig=config)
KubernetesJob(namespace="tests", timeout=10, kubeconfig=path, attach_to="tcp://127.0.0.1:26600")
job = KubernetesJob("tests", kubeconfig=path)
job.add_mesh("trainers", 2, image_spec=ImageSpec("one", {"nvidia.com/gpu": 4}, shared_memory_size="1Gi"))
job.add_mesh("generators", num_replicas=1, image_spec=ImageSpec("two"), port=26700, labels={"a": "b"})
image = ImageSpec("one")
raises("a selector", ValueError, lambda: job.add_mesh("x", 1, image_spec=image, label_selector="a=b"))
raises("a rank label", ValueError, lambda: job.add_mesh("x", 1, image_spec=image, pod_rank_label="a"))
raises("labels of others", ValueError, lambda: job.add_mesh("x", 1, labels={"a": "b"}))
raises("an image and a template", ValueError, lambda: job.add_mesh("x", 1, image_spec=image, pod_template={}))
show(job.apply_id is None, job.active)
