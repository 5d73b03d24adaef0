"""Old name of plan.py --cost."""

from jobs._main import run_old

if __name__ == "__main__":
    run_old("cost")
