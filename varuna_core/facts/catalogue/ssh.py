"""Lines that ssh writes to its standard error when it cannot reach a machine."""

from __future__ import annotations

from functools import partial

from varuna_core.facts.catalogue.known_line import Proof, Scope, Stream, make_row
from varuna_core.facts.catalogue.remedies import do
from varuna_core.facts.cause import EndCause
from varuna_core.facts.remedy import Action, Remedy, Target

failure = partial(
    make_row,
    Scope.SSH,
    Proof.CAUSE,
    stream=Stream.STDERR,
    cause=EndCause.MACHINE_UNREACHABLE,
)

LOG_IN = Remedy(Action.RUN, Target.LOGIN, detail="once by hand")
OFF_THE_LIST = Remedy(Action.REMOVE, Target.MACHINE_LIST, instead=True)

ROWS = (
    failure(
        "changed key",
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "the machine's host key is not the one in known_hosts",
        do(
            "remove the old key with `ssh-keygen -R MACHINE`",
            when="the machine was reinstalled",
        ),
        LOG_IN,
    ),
    failure(
        "unknown key",
        r"Host key verification failed|host key is known",
        "the machine's host key is not known here",
        LOG_IN,
        do("compare the key"),
    ),
    failure(
        "login refused",
        r"Permission denied|Too many authentication failures",
        "it refused the login",
        Remedy(
            Action.RUN,
            Target.LOGIN,
            detail=", which must work without a password (ssh-copy-id, or IdentityFile in "
            "~/.ssh/config)",
        ),
    ),
    failure(
        "unknown name",
        r"Could not resolve hostname|Name or service not known",
        "no such host is known here",
        do("add the host to ~/.ssh/config"),
        OFF_THE_LIST,
    ),
    failure(
        "unreachable",
        r"Connection (refused|timed out|reset)|timed out|No route to host|unreachable"
        r"|Connection closed|kex_exchange",
        "it cannot be reached",
        Remedy(Action.RUN, Target.LOGIN, detail="to see whether its sshd answers"),
        OFF_THE_LIST,
    ),
    failure(
        "configuration",
        r"Bad configuration option|Bad owner or permissions|Can't open user config",
        "the configuration of ssh is wrong",
    ),
)
