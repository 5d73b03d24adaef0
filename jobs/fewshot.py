"""Old name of evaluate.py --shots."""

from jobs._main import run_old

if __name__ == "__main__":
    run_old("fewshot")
