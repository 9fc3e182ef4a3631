"""The project's state machines as data: which policy the engine serves, and what a request is doing.

Imports `transitions` and nothing of the engine. `python -m statemachines` prints the diagrams.
"""
