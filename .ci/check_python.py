"""Say clearly what is missing before `make` builds its environment: Python 3.10 or newer, and a way to make a venv.

Runs under the system's own interpreter, whatever its age, so it uses nothing newer than Python 2.7's syntax.
"""

import sys

MINIMUM = (3, 10)


def find_problem():
    """One message that ends with what to do, or None."""
    if sys.version_info[:2] < MINIMUM:
        return "Python %d.%d or newer is needed; %s is %d.%d. Name another one: make ... PYTHON=/path/to/python3" % (
            MINIMUM + (sys.executable,) + tuple(sys.version_info[:2])
        )
    try:
        import ensurepip  # noqa: F401  (Debian splits it off into python3-venv)
        import venv  # noqa: F401
    except ImportError as error:
        return (
            "%s cannot make a virtual environment (%s). On Debian and Ubuntu: apt-get install python3-venv. "
            "Or name another interpreter: make ... PYTHON=/path/to/python3" % (sys.executable, error)
        )
    return None


if __name__ == "__main__":
    problem = find_problem()
    if problem:
        sys.exit(problem)
