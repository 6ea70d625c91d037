"""Private names of torch that varuna_core uses, each with its reason.

torch promises nothing about them: `TRIED` says with which versions they were tried, and a row what
happens where a name is missing. test_private_torch.py holds that varuna_core uses no others, and
that each is there and does what it is used for; `make newest` runs it with the newest torch that
setup.cfg allows.
"""

from __future__ import annotations

from typing import NamedTuple

TRIED = ("2.9", "2.13", "2.15")
"""Versions that the names were tried with."""


class PrivateName(NamedTuple):
    """Private names of torch that go together."""

    names: str
    """Separated by spaces; each is found from a module or from an object of its first word."""

    reason: str
    without: str
    """The behaviour of the runtime where a name is missing."""


NO_IMPORT = "varuna_core.runtime is not imported: use a version that was tried"
NO_START = "Varuna(...) ends with AttributeError, on all ranks"
NO_STEP = "the first step ends with AttributeError, on all ranks"

PRIVATE_NAMES = (
    PrivateName(
        "torch._C._are_functorch_transforms_active torch.autograd.forward_ad._current_level",
        "leave a linear layer to torch within vmap, grad, jvp and forward mode",
        NO_STEP,
    ),
    PrivateName(
        "torch._C._will_engine_execute_node",
        "make no weight gradient in a backward that wants those of activations alone",
        NO_STEP,
    ),
    PrivateName(
        "Tensor._is_view torch.ops.aten._unsafe_view",
        "give a layer's output as torch does: not as a view, which could not change in place",
        NO_STEP,
    ),
    PrivateName(
        "torch._C._autograd._saved_tensors_hooks_is_enabled",
        "find in the dry run what recompute='offload' cannot copy out",
        NO_START,
    ),
    PrivateName(
        "torch._C._SetExcludeDispatchKeyGuard",
        "let products that recompute='selective' keeps count their changes",
        "recompute='selective' ends in the first step",
    ),
    PrivateName(
        "torch.utils._python_dispatch.TorchDispatchMode OpOverload._schema",
        "see each operation of the dry run: its cost, its tensors, what it writes and draws",
        NO_IMPORT,
    ),
    PrivateName(
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
        "copy the parts of a tensor subclass out of memory, with recompute='offload'",
        NO_IMPORT,
    ),
    PrivateName(
        "torch.utils._pytree",
        "take apart nested inputs, outputs and crossings; torch has no public tree of its own",
        NO_IMPORT,
    ),
    PrivateName(
        "torch._subclasses.fake_tensor.FakeTensor torch._subclasses.fake_tensor.FakeTensorMode",
        "run the model dry without memory or time",
        NO_IMPORT,
    ),
    PrivateName(
        "torch.nn.modules.batchnorm._BatchNorm torch.nn.modules.batchnorm._NormBase",
        "keep batch norms of every dimension in fp32; their public classes have no other in common",
        NO_IMPORT,
    ),
    PrivateName(
        "Module._parameters Module._buffers Module._modules",
        "put stand-ins, micro-batches' buffers and shares in a module's slots, which the public "
        "methods check and convert",
        NO_START,
    ),
    PrivateName(
        "Module._forward_hooks Module._forward_pre_hooks Module._backward_hooks "
        "Module._backward_pre_hooks",
        "let a user's hooks rest in dry runs and in checks, and refuse to compile modules that "
        "have some; torch lists none of them",
        NO_START,
    ),
    PrivateName(
        "Parameter._backward_hooks Parameter._post_accumulate_grad_hooks",
        "run a user's hooks on the summed gradient, once a step",
        NO_START,
    ),
    PrivateName(
        "Tensor._version",
        "notice a change in place of an input, of what crossed a cut, or of what a save copies; "
        "torch's notes on autograd name it",
        NO_START,
    ),
    PrivateName(
        "Storage._cdata",
        "tell whether two tensors share memory",
        NO_START,
    ),
    PrivateName(
        "torch._foreach_add_ torch._foreach_addcmul_ torch._foreach_copy_ torch._foreach_div "
        "torch._foreach_div_ torch._foreach_lerp_ torch._foreach_mul_ torch._foreach_norm "
        "torch._foreach_sqrt_ torch._foreach_zero_",
        "work on many tensors in one launch, as torch's own optimizers do",
        NO_STEP,
    ),
    PrivateName(
        "MseLossBackward0._saved_reduction",
        "warn of a loss that is a sum, which is not what Varuna takes it for",
        "nobody is warned of reduction='sum'",
    ),
    PrivateName(
        "SGD._opt_called",
        "keep torch's schedulers from a wrong warning after a step that fp16 skips",
        "that warning is printed",
    ),
    PrivateName(
        "torch.distributed.distributed_c10d._get_default_store",
        "meet before groups are made: refusals, differences, first errors",
        NO_START,
    ),
    PrivateName(
        "torch.distributed.distributed_c10d._get_default_group",
        "keep new groups from being splits of the user's NCCL communicator",
        NO_START,
    ),
    PrivateName(
        "torch.distributed.ProcessGroupGloo._Options Options._devices Options._threads "
        "Options._timeout",
        "share one thread among gloo's groups",
        "each group has threads of its own",
    ),
    PrivateName(
        "torch.distributed.distributed_c10d._set_pg_timeout",
        "let no wait of a group end after torch's half hour",
        "a run in which Varuna meets the ranks does not start",
    ),
    PrivateName(
        "ProcessGroup._get_backend torch.distributed.distributed_c10d._abort_process_group "
        "ProcessGroupNCCL._group_start ProcessGroupNCCL._group_end",
        "end NCCL's work where a rank has failed; to destroy the group would wait for it",
        "a failure takes until torch's time limit",
    ),
    PrivateName(
        "torch.distributed._functional_collectives.AsyncCollectiveTensor DTensor._local_tensor",
        "wait for a share of a layer that is still on its way",
        "tensor=T does not start",
    ),
    PrivateName(
        "torch._dynamo.exc",
        "tell what torch.compile cannot do from an error of the model",
        "compile=True does not start",
    ),
    PrivateName(
        "StateDict._metadata",
        "give a gathered state dict the versions of its modules",
        "gather_state_dict ends with AttributeError",
    ),
    PrivateName(
        "torch._utils._rebuild_tensor_v2 torch._utils._rebuild_parameter",
        "read torch's pickles without running what they name",
        "checkpoints of others are not read",
    ),
    PrivateName(
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "read the metadata of a folder of torch.distributed.checkpoint",
        "such folders are not read",
    ),
    PrivateName(
        "torch.cuda._sleep",
        "keep a GPU busy for a known time while a profile is taken",
        "no profile on a GPU",
    ),
)
"""Those of torch that `varuna_core/trace` looks for in running programs are not among them: what is
not there is not traced."""
