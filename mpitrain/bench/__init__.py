"""Benchmarks: each number beside what a user would pick instead, in the same run."""
