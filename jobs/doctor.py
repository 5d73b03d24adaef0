"""Check what a sweep needs, without training. Takes the flags of pareto_sweep.py, and --json.

  python jobs/doctor.py                                        # a laptop, or a head node
  python jobs/doctor.py --workers 8 --set scale.use_gpu=true   # the cluster for that sweep
  ray job submit --working-dir . -- python jobs/doctor.py --storage s3://bucket/prefix
  python jobs/doctor.py --json                                 # findings on stdout, progress on stderr

Every sweep runs the same checks before it starts. Exit code 1 if a check fails. docs/doctor.md lists them.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING

from jobs.sweep_flags import parse
from jobs.usage import command

if TYPE_CHECKING:
    from orchestrator.sweeps.preflight import Finding


def main() -> None:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--json", action="store_true", help="findings as one document on stdout")
    args = parse(__doc__, own)
    with command("checking what the sweep needs", to=sys.stderr if args.json else None):
        with redirect_stdout(sys.stderr if args.json else sys.stdout):
            findings = examine(args)
        failed = sum(not finding.ok for finding in findings)
        if args.json:
            print(json.dumps({"findings": [asdict(one) for one in findings], "failed": failed}, indent=1))
        else:
            for one in findings:
                print(f"{'ok' if one.ok else 'FAIL':5} {one.check:13} {one.message}")
            print(f"{failed} of {len(findings)} checks failed")
        if failed:
            sys.exit(1)


def examine(args: argparse.Namespace) -> list[Finding]:
    from jobs.command import connect, open_store
    from jobs.sweep_flags import sweep_from
    from orchestrator.sweeps.preflight import preflight

    sweep = sweep_from(args)
    return preflight(
        sweep,
        connect=connect,
        open_store=lambda: open_store(args),
        retrain=bool(args.confirm),
        verify=args.verify,
    )


if __name__ == "__main__":
    main()
