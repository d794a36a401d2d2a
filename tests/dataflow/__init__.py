"""A job for Dataflow from its submission to its end, on this machine: the service, and workers in clean environments."""
