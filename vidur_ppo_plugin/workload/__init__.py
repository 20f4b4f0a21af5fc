"""Workloads as arrays: lengths, arrivals, traces. numpy only; knows neither Vidur nor a cluster."""
