"""Where container stores lie unless a conf says otherwise: apart, for who needs no conf for it."""

SCRATCH = "/tmp"
