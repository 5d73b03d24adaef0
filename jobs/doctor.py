"""Check what a sweep needs, without training. Takes the flags of pareto_sweep.py, and --json.

  python jobs/doctor.py                                        # a laptop, or a head node
  python jobs/doctor.py --workers 8 --set scale.use_gpu=true   # the cluster for that sweep
  ray job submit --working-dir . -- python jobs/doctor.py --storage s3://bucket/prefix
  python jobs/doctor.py --json                                 # findings on stdout, progress on stderr

Every sweep runs the same checks before it starts. Exit code 1 if a check fails. docs/doctor.md lists them.
"""

import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass

from jobs._cli import command, connect
from jobs._flags import flag, parse
from jobs.pareto_sweep import SweepFlags


@dataclass(frozen=True, kw_only=True)
class DoctorFlags(SweepFlags):
    json: bool = flag(False, "print the findings as one document on stdout")


def main() -> None:
    flags = parse(DoctorFlags, __doc__)
    to, plugins = sys.stderr if flags.json else None, flags.run.places.plugin
    with command("checking what the sweep needs", plugins=plugins, to=to):
        from orchestrator.sweeps.preflight import preflight

        with redirect_stdout(sys.stderr if flags.json else sys.stdout):
            sweep = flags.make()
            flags.priced(sweep)
            findings = preflight(
                sweep,
                connect=connect,
                open_store=flags.run.places.open_store,
                retrain=bool(flags.retrain()),
                verify=flags.run.verify,
            )
        failed = sum(not finding.ok for finding in findings)
        if flags.json:
            print(json.dumps({"findings": [asdict(one) for one in findings], "failed": failed}, indent=1))
        else:
            for finding in findings:
                print(f"{'ok' if finding.ok else 'FAIL':5} {finding.check:13} {finding.message}")
            print(f"{failed} of {len(findings)} checks failed")
        if failed:
            sys.exit(1)


if __name__ == "__main__":
    main()
