"""The command line: `aengine models | rollout | demo | ledger | diagram`."""
