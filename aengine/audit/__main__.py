"""`python -m aengine.audit` prints the JSON schema of a line of a rollouts file."""

import json

from aengine.audit.record import rollout_schema

if __name__ == "__main__":
    print(json.dumps(rollout_schema(), indent=2))
