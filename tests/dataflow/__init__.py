"""A job for Dataflow from submission to end on one machine: the service, and workers in clean environments."""
