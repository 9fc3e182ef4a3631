"""`python -m statemachines` prints the diagrams and the tables as Markdown."""

from statemachines.render import report

if __name__ == "__main__":
    print(report())
