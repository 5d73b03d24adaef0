"""Transfer: fine-tuning on other data sets and suites of them, beside a linear probe."""
