"""Which test covers which fault class: faults that engines of this kind really had, each with the tests that fail when
it is planted. For the control plane `faults.py` plants them in every run: `PLANTED` says which stands for which class.
"""

import ast
from itertools import chain
from pathlib import Path

import pytest

from tests.engine.faults import FAULTS

TESTS = Path(__file__).parents[1]

BLOCKS, IN_USE = "engine/test_block_manager.py", "engine/test_blocks_in_use.py"
SCHEDULER, SHADOW, API = "engine/test_scheduler.py", "engine/test_shadow_kv.py", "engine/test_engine_api.py"
LLM, ERRORS, SAME = "engine/test_llm.py", "engine/test_llm_errors.py", "engine/test_llm_invariance.py"
CONFORMANCE, STAGES, PARAMETERS = "engine/test_conformance.py", "stages/conformance.py", "engine/test_parameters.py"
SAMPLER, OPTIONS, GUMBEL = "kernels/test_sampler.py", "kernels/test_sampler_options.py", "kernels/test_gumbel.py"
TEXT, ENGINE_TEXT = "engine/test_detokenizer.py", "engine/test_engine_text.py"
LOADING, CHECKPOINT, LOGITS, ORACLE = (
    "models/test_loading.py", "models/test_checkpoint.py", "models/test_logits.py", "test_oracle.py",
)  # fmt: skip

COVERED: dict[str, list[tuple[str, str]]] = {
    # Prefix cache
    "P1 a prompt cached whole, again and three times in a batch": [
        (BLOCKS, "test_p1_the_last_token_is_never_taken_from_the_cache"),
        (IN_USE, "test_p1_a_prompt_that_is_cached_whole"),
        (SAME, "test_p1_a_prompt_that_is_cached_whole_has_the_same_logprobs"),
    ],
    "P2 a block refilled under another prefix": [
        (BLOCKS, "test_p2_a_block_that_was_refilled_is_not_found_under_its_old_name"),
        (IN_USE, "test_p2_blocks_that_are_refilled_under_other_prefixes"),
    ],
    "P4 blocks published before their KV exists; abort in mid-prefill": [
        (BLOCKS, "test_only_what_was_published_is_found"),
        (IN_USE, "test_p4_only_what_was_computed_before_an_abort_is_found"),
        (IN_USE, "test_p4_what_is_in_flight_is_not_found"),
    ],
    "P5 a constant hash": [
        (BLOCKS, "test_p5_a_digest_that_always_collides_gives_no_false_hit"),
        (SHADOW, "test_p5_histories_in_which_every_digest_collides"),
    ],
    "P5 ids that agree in their low byte": [(BLOCKS, "test_p5_ids_that_agree_in_their_low_byte_are_told_apart")],
    "P5 two salts": [
        (BLOCKS, "test_p5_other_salts_share_nothing"),
        (IN_USE, "test_p5_salts_keep_equal_prompts_apart"),
        (LLM, "test_the_same_script_runs_on_both"),
    ],
    "P5 equal blocks under different parents": [
        (BLOCKS, "test_p5_equal_blocks_after_different_beginnings_are_told_apart")
    ],
    "P6 a prompt cached in free blocks that just fits": [
        (BLOCKS, "test_p6_the_hits_of_a_sequence_are_not_evicted_by_its_own_allocation"),
        (IN_USE, "test_p6_a_prompt_cached_in_free_blocks_fits_exactly_and_is_charged_for_the_rest_only"),
    ],
    # Blocks
    "B2 one of two sharers finishes, is aborted, is preempted": [
        (BLOCKS, "test_b2_a_shared_block_outlives_the_one_who_computed_it"),
        (IN_USE, "test_b2_one_of_two_sharers_goes_and_the_other_is_unharmed"),
    ],
    "B2 eviction is LRU, tail first": [
        (BLOCKS, "test_b2_eviction_takes_the_least_recently_used_and_of_a_text_the_tail_first")
    ],
    "B3 abort waiting, between chunks, decoding, finishing, finished, unknown, n=2": [
        (IN_USE, "test_b3_an_abort_at_any_moment")
    ],
    "B3 abort while preempted": [(IN_USE, "test_b3_an_abort_while_preempted")],
    # Scheduler
    "S1 what can never fit is refused when added": [
        (SCHEDULER, "test_s1_what_can_never_run_is_refused_and_disturbs_no_one"),
        (SCHEDULER, "test_s1_what_just_fits_is_accepted"),
        (ERRORS, "test_bad_input_is_named_and_leaves_nothing"),
    ],
    "S1 a resumed sequence longer than a step": [
        (SCHEDULER, "test_s1_a_resumed_sequence_comes_in_chunks_also_with_chunking_off")
    ],
    "S2 preempt and resume, greedy and seeded": [
        (SCHEDULER, "test_s2_a_pool_that_is_too_small_changes_no_token"),
        (SAME, "test_s2_preemption_shows_neither_in_tokens_nor_in_logprobs"),
        (STAGES, "test_a_pool_far_too_small"),
    ],
    "S3 priority, and preemption only for strictly higher": [
        (SCHEDULER, "test_s3_an_urgent_request_takes_the_only_seat_and_gives_it_back"),
        (SCHEDULER, "test_s3_an_urgent_request_preempts_no_one_in_vain"),
        (SCHEDULER, "test_s3_an_urgent_request_takes_blocks_that_the_less_urgent_share_among_themselves"),
        (LLM, "test_priority_decides_who_goes_first"),
    ],
    "S3 many equals on a tight pool": [(SCHEDULER, "test_s3_many_equals_on_a_tight_pool_end_in_bounded_time")],
    "S4 a decode beside a prompt of forty chunks": [
        (SCHEDULER, "test_s4_a_decode_gets_its_token_in_every_step_beside_a_long_prompt")
    ],
    "S6 degenerate requests": [
        (SCHEDULER, "test_s6_degenerate_requests_are_refused"),
        (CONFORMANCE, "test_scheduler_s6_degenerate_requests"),
        (PARAMETERS, "test_parameters_out_of_range_are_named_with_the_remedy"),
        (ERRORS, "test_bad_input_is_named_and_leaves_nothing"),
    ],
    "S7 twelve requests, twelve sets of parameters, input order": [
        (SCHEDULER, "test_s7_twelve_requests_with_twelve_sets_of_parameters"),
        (STAGES, "test_scheduler_s7_every_request_has_its_own_parameters"),
        (LLM, "test_outputs_are_in_the_order_of_the_prompts_whatever_ends_first"),
    ],
    "S7 a list of the wrong length, an unknown keyword": [
        (ERRORS, "test_bad_input_is_named_and_leaves_nothing"),
        (PARAMETERS, "test_parameters_that_do_not_exist_are_a_type_error"),
    ],
    # Chunked prefill
    "C1 chunk sizes times cached blocks": [
        (IN_USE, "test_c1_chunk_sizes_and_cached_blocks_do_not_show"),
        (SAME, "test_c1_chunks_and_cached_blocks_do_not_show_in_logprobs"),
    ],
    "C2 one token of a prompt of several chunks": [(IN_USE, "test_c2_only_the_last_chunk_gives_a_token_and_an_end")],
    # Sampler
    "M1 tiny temperatures on wide logits, mixed": [
        (SAMPLER, "test_tiny_temperatures_agree_with_argmax_on_wide_logits"),
        (SAMPLER, "test_temperature_zero_is_exact_argmax_and_takes_the_lowest_of_equals"),
        (SAMPLER, "test_denormal_and_huge_temperatures_give_a_token"),
        (GUMBEL, "test_noise_is_finite_at_both_ends_of_the_bits"),
    ],
    "M2 filters at their ends, mixed rows, 20,000 draws": [
        (SAMPLER, "test_frequencies_fit_the_known_probabilities_in_a_mixed_batch"),
        (SAMPLER, "test_frequencies_over_seeds_fit_as_well"),
        (SAMPLER, "test_top_k_keeps_exactly_k_among_equals"),
        (GUMBEL, "test_noise_is_gumbel_and_independent_along_each_argument"),
    ],
    "M3 alone and in a batch of five": [
        (SAMPLER, "test_alone_and_in_a_batch_give_the_same_tokens_and_logprobs"),
        (SAMPLER, "test_a_row_without_filters_gets_the_same_token_from_both_tails"),
        (SAME, "test_m3_alone_and_in_a_batch_of_five"),
        (OPTIONS, "test_logprobs_are_the_models_own"),
    ],
    # Text
    "D1 characters over several tokens, one id at a time": [
        (TEXT, "test_any_ids_one_at_a_time_give_the_full_decode"),
        (TEXT, "test_a_character_shows_when_its_last_byte_is_there_and_not_before"),
    ],
    "D1 ended in mid-character by EOS, length, stop": [
        (TEXT, "test_ended_in_mid_character"),
        (TEXT, "test_ended_in_mid_character_by_a_stop_string"),
        (SAME, "test_d1_text_while_it_grows_is_the_text_of_its_tokens"),
    ],
    "D2 a stop string over several tokens, nothing leaks": [
        (TEXT, "test_a_stop_string_over_several_tokens_never_leaks"),
        (ENGINE_TEXT, "test_a_stop_string_ends_the_output"),
        (LLM, "test_the_same_script_runs_on_both"),
    ],
    "D2 a false start": [
        (TEXT, "test_a_false_start_is_released_on_the_miss_or_at_the_end"),
        (TEXT, "test_a_false_start_that_overlaps_the_true_one"),
    ],
    "D2 two stops, the earliest wins": [
        (TEXT, "test_of_several_the_first_to_be_complete_wins_however_the_text_is_cut")
    ],
    "D2 a stop that ends inside a token": [(TEXT, "test_a_stop_string_that_begins_and_ends_inside_tokens")],
    # Loading
    "L1 tied with and without a head, untied without": [
        (LOADING, "test_tied_with_and_without_a_head_in_the_file"),
        (LOADING, "test_untied_without_a_head_is_an_error"),
    ],
    "L2 deleted and added tensors": [(LOADING, "test_everything_that_does_not_fit_is_in_one_error")],
    "L2 a shard missing, stray files": [
        (LOADING, "test_missing_shards_are_named"),
        (LOADING, "test_a_tensor_that_the_index_promises_and_the_shard_lacks_is_missing"),
        (LOADING, "test_files_and_tensors_beside_the_index_are_ignored"),
    ],
    "L2 an empty directory": [(CHECKPOINT, "test_directories_that_are_no_checkpoint")],
    "L2 biases": [(LOADING, "test_biases_of_qwen2_are_used_and_needed")],
    "L2 no head_dim": [
        (CHECKPOINT, "test_what_a_config_without_head_dim_means_depends_on_the_family"),
        (LOGITS, "test_logits_up_to_the_last_position"),
    ],
    "L3 two spellings": [(LOGITS, "test_the_two_spellings_of_a_config_give_the_same_logits")],
    "L3 an unsupported scaling": [
        (CHECKPOINT, "test_an_unsupported_rope_scaling_is_refused_by_name"),
        (CHECKPOINT, "test_a_rope_scaling_beside_rope_parameters_is_never_ignored"),
    ],
    # Numerics
    "N1 RoPE in fp32, at position 4095": [
        (LOGITS, "test_rotary_angles_stay_float32_in_a_half_precision_model"),
        (LOGITS, "test_logits_up_to_the_last_position"),
    ],
    "N1 decode equals the full forward": [
        (LOGITS, "test_decode_at_every_position_equals_the_full_forward"),
        (STAGES, "test_numerics_n1_logits_at_every_position"),
    ],
    "N2 half precision is judged by logits and margin": [
        (ORACLE, "test_numerics_n2_half_precision_tokens_are_judged_by_margin"),
        (ORACLE, "test_the_rms_rule_compares_with_hf_in_the_same_precision"),
        (LOGITS, "test_half_precision_is_as_close_to_the_truth_as_hugging_face"),
    ],
}

PLANTED = {
    "P1": ["a whole prompt is taken from the cache"],
    "P2": ["a refilled block is still found under its old name"],
    "P4": ["blocks are published when they are planned", "a half-computed block is published"],
    "P5": ["a collision of digests is believed", "a block's name forgets what came before it", "the salt is ignored"],
    "P6": [
        "a sequence evicts its own hits",
        "free hits are not counted as needed",
        "the token budget counts cached tokens",
    ],
    "B2": ["a shared block is not counted for its new user"],
    "B3": ["an abort leaves the blocks taken", "a surplus token is kept"],
    "S2": ["a preempted sequence keeps its block table on the device", "a preempted sequence is taken for computed"],
    "S3": ["equals take seats from each other", "the one preempted is the foremost"],
    "S4": ["the waiting overtake one that does not fit"],
    "C2": ["every chunk samples"],
}
CLASSES = "P1 P2 P4 P5 P6 B2 B3 S1 S2 S3 S4 S6 S7 C1 C2 M1 M2 M3 D1 D2 L1 L2 L3 N1 N2".split()


def names_in(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("case", COVERED)
def test_every_case_has_tests_that_exist(case: str) -> None:
    assert COVERED[case]
    assert [f"{file}::{name}" for file, name in COVERED[case] if name not in names_in(file)] == []


def test_no_class_is_left_out() -> None:
    assert list(dict.fromkeys(case.split()[0] for case in COVERED)) == CLASSES
    assert PLANTED.keys() <= set(CLASSES) and set(chain(*PLANTED.values())) <= FAULTS.keys()
