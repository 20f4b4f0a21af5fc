"""What is read off a backend's metrics page, whatever the version calls it."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vidur_ppo_plugin.serve.reports import ALIASES, parse_report

NEW = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running_created{engine="0",model_name="m"} 1.7e9
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 5.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 4.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 8.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 1.5
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 50.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",num_gpu_blocks="1024",swap_space="4"} 1.0
"""
OLD = NEW.replace("kv_cache_usage_perc", "gpu_cache_usage_perc").replace(
    "inter_token_latency_seconds", "time_per_output_token_seconds"
)


@pytest.mark.parametrize("page", [NEW, OLD, NEW + OLD.replace("0.25", "0.75").replace(" 3.0", " 9.0")])
def test_new_and_old_names_and_the_newest_of_both(page: str) -> None:
    # A page with both names, as in the versions in between: each gauge counts once, by its newest name.
    report = parse_report(page.replace('vllm:num_requests_running{engine="0",model_name="m"} 9.0\n', ""))
    assert (report.kv_used_fraction, report.kv_blocks_total, report.kv_block_size) == (0.25, 1024, 32)
    assert report.running == 3
    assert report.tbt_s == (1.5, 50)


def test_it_reads_what_prometheus_own_parser_reads() -> None:
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(NEW)
        for sample in family.samples
        if not sample.name.endswith(("_created", "_bucket"))
    }
    report = parse_report(NEW)
    assert report.running == values["vllm:num_requests_running"]
    assert report.waiting == values["vllm:num_requests_waiting"]
    assert report.kv_used_fraction == values["vllm:kv_cache_usage_perc"]
    assert report.ttft_s == (
        values["vllm:time_to_first_token_seconds_sum"],
        values["vllm:time_to_first_token_seconds_count"],
    )


def test_engines_behind_one_address_are_added_and_shares_averaged() -> None:
    page = NEW + NEW.replace('engine="0"', 'engine="1"').replace("0.25", "0.75")
    report = parse_report(page)
    assert (report.running, report.waiting, report.kv_used_fraction) == (6, 4, 0.5)


def test_a_page_without_the_figures_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="vllm:num_requests_waiting"):
        parse_report("vllm:num_requests_running 1\n")
    report = parse_report("vllm:num_requests_running 1\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc NaN\n")
    assert (report.kv_used_fraction, report.kv_blocks_total, report.ttft_s) == (None, None, None)


def test_every_figure_has_an_alias_of_each_server() -> None:
    for names in ALIASES.values():
        assert {name.partition(":")[0] for name in names} == {"vllm", "sglang"}
