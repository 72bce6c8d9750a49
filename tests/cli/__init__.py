"""Tests of the commands of `monarch-kernel`."""
