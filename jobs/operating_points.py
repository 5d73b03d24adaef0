"""Old name of evaluate.py --grid."""

from jobs._main import run_old

if __name__ == "__main__":
    run_old("operating_points")
