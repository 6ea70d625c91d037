# Copyright the vjob developers. See LICENSE.
# For Spack's builtin repository, as packages/py_vjob/package.py. Held by tests/test_release.py: the
# dependencies are those of setup.cfg. Not tried by Spack itself.

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyVjob(PythonPackage):
    """Train large models with pipeline parallelism on Slurm clusters, mixed or uniform."""

    homepage = "https://example.org/vjob"
    url = "https://example.org/vjob/vjob-0.1.0.tar.gz"

    license("MIT", checked_by="vjob")

    version("0.1.0", sha256="0000000000000000000000000000000000000000000000000000000000000000")

    variant("train", default=False, description="Train with varuna_core, which needs torch")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@68:", type="build")
    with default_args(type=("build", "run")):
        depends_on("py-click@8.1:8")
        depends_on("py-jinja2@3.1:3")
        depends_on("py-pyyaml@6:6")
        depends_on("py-submitit@1.5.3:1")
        depends_on("py-numpy@1.26:")
        depends_on("py-pandas@2.2:3")
        depends_on("py-plotly@6:")
        depends_on("py-pyarrow@17:")
        depends_on("py-py-spy@0.4:")
        depends_on("py-textual@8:")
        depends_on("py-torch@2.9:", when="+train")
