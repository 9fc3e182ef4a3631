"""The command line: `aengine models | rollout | demo | diagram`."""
