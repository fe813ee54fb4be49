"""The benches: chances of acceptance against the engine's own rounds, lengths, loads, options, and both commands."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import CPU, embedded_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from tlt_hpc.cli.main import main, make_parser
from tlt_hpc.common.records import Stream
from tlt_hpc.config import EMBEDDED_MODEL
from tlt_hpc.models.documents import attend_documents
from tlt_hpc.models.folder import embedded
from tlt_hpc.models.generate import WAYS, Generate, pad_left
from tlt_hpc.rollout.noise import gumbel_rows, noise_key
from tlt_hpc.rollout.strategy import OFF, Strategy
from tlt_hpc.studies.bench.accept import summarise
from tlt_hpc.studies.bench.bench_options import read_options
from tlt_hpc.studies.bench.chances import Grid, measure
from tlt_hpc.studies.bench.coupling import draw_gumbel, hits, noise_given_winner, ranks
from tlt_hpc.studies.bench.lengths import Tree, accept_lengths, reached, visits
from tlt_hpc.studies.bench.rejection import overlap, reject_rounds
from tlt_hpc.studies.bench.rollout import Plan, bytes_per_round, load_of, milliseconds_of, num_mismatched, rotated
from tlt_hpc.studies.bench.strategies import chosen_strategies
from tlt_hpc.studies.bench.subject import Limits, Subject, make_engine, open_subject, roll_out
from tlt_hpc.studies.bench.tables import accept_table
from tlt_hpc.studies.bench.unroll import TokenLogits, unroll
from tlt_hpc.studies.bench.workload import Workload, built_in_prompts, read_prompts


@pytest.fixture(scope="module")
def subject() -> Subject:
    return open_subject(EMBEDDED_MODEL, None, "float32", CPU)


def workload(**changes) -> Workload:
    settings = {"prompts": None, "tokenizer": embedded_tokenizer(), "lengths": "own", "max_new_tokens": 64}
    return Workload(**{**settings, "temperature": 1.0, "seed": 0, **changes})


def run(subject: Subject, strategy: Strategy, count: int, max_live: int = 4):
    work = workload()
    limits = Limits(max_live, work.max_prompt_tokens, work.max_new_tokens)
    engine = make_engine(subject, limits, 1.0, (strategy,), work.requests(2, 0, Stream.CALIBRATION))
    return roll_out(engine, work.requests(count, 0))


# -- chances ------------------------------------------------------------------------------------------------------


def test_noise_given_the_winner_has_the_law_of_noise_that_made_it_win():
    draws = torch.Generator().manual_seed(0)
    target, draft = torch.randn(1, 6, generator=draws) * 1.5, torch.randn(1, 6, generator=draws) * 1.5
    free = draw_gumbel((200_000, 6), draws)
    winners = (target + free).argmax(-1)
    for token in range(6):
        noise = noise_given_winner(target, torch.tensor([token]), 40_000, draws)[0]
        assert bool(((target + noise).argmax(-1) == token).all())
        real = free[winners == token]
        error = 4 / len(real) ** 0.5 + 0.02
        assert noise.mean(0).tolist() == pytest.approx(real.mean(0).tolist(), abs=1.3 * error)
        given = hits(ranks(draft + noise, torch.full((40_000,), token)).unsqueeze(0), 3).squeeze(1)
        wanted = hits(ranks(draft + real, torch.full((len(real),), token)).unsqueeze(0), 3).squeeze(1)
        assert given.tolist() == pytest.approx(wanted.tolist(), abs=error)


def test_one_candidate_of_shared_noise_lies_between_its_bounds():
    draws = torch.Generator().manual_seed(0)
    target, draft = torch.randn(40, 8, generator=draws) * 2, torch.randn(40, 8, generator=draws) * 2
    noise = draw_gumbel((40, 20_000, 8), draws)
    match = hits(ranks(draft.unsqueeze(1) + noise, (target.unsqueeze(1) + noise).argmax(-1)), 1)[0]
    shared = overlap(target.softmax(-1), draft.softmax(-1))
    assert bool((match < shared + 0.015).all())
    assert bool((match > shared / (2 - shared) - 0.015).all())


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_unrolled_drafts_are_the_engines(subject, depth):
    """With the noise of its key, a response walked along the unrolled logits takes the engine's number of rounds."""
    for response in run(subject, Strategy("drafter", depth), 6).rollouts:
        tokens = torch.from_numpy(np.concatenate([response.prompt_tokens, response.response_tokens])).long()
        logits = unroll(
            subject.decoder, subject.drafter, tokens, len(response.prompt_tokens), subject.num_tokens, depth
        )
        length = len(logits.tokens)
        words = torch.tensor([noise_key(response.key)])
        noise = gumbel_rows(words, torch.arange(length).unsqueeze(0), subject.num_tokens)[0]
        assert torch.equal((logits.target + noise).argmax(-1), logits.tokens)
        place = num_rounds = 0
        while place < length:
            matches = 0
            while matches < min(depth, length - place) and (
                int((logits.draft[matches][place] + noise[place + matches]).argmax()) == logits.tokens[place + matches]
            ):
                matches += 1
            place, num_rounds = place + matches + 1, num_rounds + 1
        assert num_rounds == response.num_target_passes


def test_a_start_sees_the_true_features_before_it_and_its_own_after(subject):
    """Every depth from one start, against the drafter run anew over the whole sequence of pairs."""
    response = run(subject, OFF, 1).rollouts[0]
    prompt_length, start, depth = len(response.prompt_tokens), 7, 4
    tokens = torch.from_numpy(np.concatenate([response.prompt_tokens, response.response_tokens])).long()
    logits = unroll(subject.decoder, subject.drafter, tokens, prompt_length, subject.num_tokens, depth)
    attend, positions = attend_documents(None), torch.arange(len(tokens))
    committed = prompt_length + start
    features = subject.decoder.hidden(tokens, positions, attend)[: committed - 1]
    for level in range(depth):
        embedded = subject.decoder.embedding[tokens[1 : len(features) + 1]]
        with torch.inference_mode():
            ahead = subject.drafter(embedded, features, positions[: len(features)], attend)[-1:]
        wanted = subject.decoder.logits(ahead)[0, : subject.num_tokens]
        assert float((logits.draft[level][start] - wanted).abs().max()) < 1e-3
        features = torch.cat([features, ahead])


def test_walks_along_a_sampled_path_have_the_length_of_free_walks():
    """The claim of ``chances``: rejection run freely on a Markov chain gives the products of chances on its paths."""
    draws = torch.Generator().manual_seed(0)
    target, draft = torch.randn(5, 5, generator=draws) * 1.5, torch.randn(5, 5, generator=draws) * 1.5
    num, depth, children = 20_000, 3, 2
    state, alive = torch.zeros(num, dtype=torch.int64), torch.ones(num, dtype=torch.bool)
    free = torch.ones(num)
    for _ in range(depth):
        state, accepted_in = reject_rounds(target[state].softmax(-1), draft[state].softmax(-1), children, draws)
        alive &= accepted_in >= 0
        free += alive
    path = [torch.zeros(1, dtype=torch.int64)]
    for _ in range(4000):
        path.append(torch.multinomial(target[path[-1]].softmax(-1), 1, generator=draws)[:, 0])
    states = torch.cat(path)
    logits = TokenLogits(states[1:], target[states[:-1]], tuple(draft[states[level:-1]] for level in range(depth)))
    walk = measure(logits, 1.0, Grid((2,), (1.0,), 16), draws).walk["rejection"]
    lengths = accept_lengths(reached(walk[:, 0]))[0]
    from_zero = lengths[(states[:-1] == 0).numpy()]
    assert float(free.mean()) == pytest.approx(from_zero.mean(), abs=0.06)


def test_temperature_zero_makes_one_rule_of_three():
    draws = torch.Generator().manual_seed(0)
    target, draft = torch.randn(50, 9, generator=draws), torch.randn(50, 9, generator=draws)
    chances = measure(TokenLogits(target.argmax(-1), target, (draft,)), 0.0, Grid((1, 2), (1.0, 2.0), 4), draws)
    for values in (chances.walk, chances.first):
        assert np.array_equal(values["shared_noise"], values["top_k"])
        assert np.array_equal(values["rejection"], values["top_k"])
    wanted = (draft.argmax(-1) == target.argmax(-1)).double().numpy()
    assert np.array_equal(chances.first["top_k"][1, 0], wanted)


def test_a_drafter_that_never_hits_has_no_gain_in_the_table():
    target = torch.nn.functional.one_hot(torch.arange(6), 9) * 5.0
    logits = TokenLogits(target.argmax(-1), target, tuple(-target[level:] for level in range(6)))
    grid = Grid((1, 2, 4), (1.0,), 4)
    report = summarise(0.0, [measure(logits, 0.0, grid, torch.Generator().manual_seed(0))], grid)
    assert report.everywhere.first_level["4"]["rejection"].value == 0
    rows = [line for line in accept_table(report).splitlines() if "first of" in line]
    assert rows
    assert all(row.endswith("0.000       -") for row in rows)


# -- lengths ------------------------------------------------------------------------------------------------------


def test_rounds_of_a_rollout_equal_those_counted_one_by_one():
    source = np.random.default_rng(0)
    chances = source.random((2, 3, 7))
    lengths, rounds = accept_lengths(reached(chances)), visits(reached(chances)).sum(1)

    def expected(a: int, r: int) -> tuple[float, float]:
        """Tokens of a round from r, and rounds from r to the end, by the definition."""
        if r >= 7:
            return 0.0, 0.0
        tokens, num_rounds, still = 0.0, 1.0, 1.0
        for accepted in range(4):
            goes_on = chances[a, accepted, r] if accepted < 3 and r + accepted < 7 else 0.0
            stops = still * (1 - goes_on)
            emitted = min(accepted + 1, 7 - r)
            tokens, num_rounds = tokens + stops * emitted, num_rounds + stops * expected(a, r + emitted)[1]
            still *= goes_on
        return tokens, num_rounds

    for a in range(2):
        assert rounds[a] == pytest.approx(expected(a, 0)[1])
        assert lengths[a].tolist() == pytest.approx([expected(a, r)[0] for r in range(7)])


def test_trees_are_named_and_counted():
    assert [Tree(1, 6).name, Tree(2, 3).name] == ["chain-6", "tree-3x2"]
    assert [Tree(1, 6).num_nodes, Tree(2, 3).num_nodes, Tree(4, 3).num_nodes] == [6, 14, 84]


# -- loads --------------------------------------------------------------------------------------------------------


def test_a_workload_is_a_function_of_its_seed_and_part():
    first, again, other = workload().requests(8, 0), workload().requests(8, 0), workload().requests(8, 1)
    assert [r.key for r in first] == [r.key for r in again]
    assert all(np.array_equal(a.prompt_tokens, b.prompt_tokens) for a, b in zip(first, again, strict=True))
    assert not {r.key for r in first} & {r.key for r in other}
    assert max(len(r.prompt_tokens) for r in first + other) <= workload().max_prompt_tokens


def test_long_tailed_lengths_are_forced_and_capped():
    params = [request.params for request in workload(lengths="long-tail", max_new_tokens=120).requests(400, 0)]
    lengths = np.array([each.max_tokens for each in params])
    assert all(each.min_tokens == each.max_tokens for each in params)
    assert lengths.min() >= 1
    assert lengths.max() == 120
    assert 14 < np.median(lengths) < 27
    assert 0.005 < (lengths == 120).mean() < 0.06


def test_prompt_files(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "gcd(4,6)="}\n\n{"prompt": "gcd(10,6)=", "answer": 2}\n')
    assert [len(tokens) for tokens in read_prompts(path, embedded_tokenizer())] == [5, 6]
    for text, what in (("{", "not JSON"), ('{"text": 1}', "needs a text 'prompt'"), ("", "has no rows")):
        path.write_text(text)
        with pytest.raises(ValueError, match=what):
            read_prompts(path, embedded_tokenizer())
    with pytest.raises(ValueError, match="does not exist"):
        read_prompts(tmp_path / "none.jsonl", embedded_tokenizer())
    assert len(built_in_prompts(embedded_tokenizer())) == 16


def test_prompts_are_padded_on_the_left():
    tokens, mask = pad_left([np.array([3, 4], np.int32), np.array([5], np.int32)], CPU)
    assert tokens.tolist() == [[3, 4], [0, 5]]
    assert mask.tolist() == [[1, 1], [0, 1]]


@pytest.fixture(scope="module")
def assistant_folder(tmp_path_factory) -> Path:
    """The embedded model in a folder of its own, to assist itself."""
    return Path(shutil.copytree(embedded("tiny"), tmp_path_factory.mktemp("assistant") / "tiny"))


def test_every_way_of_generate_gives_the_greedy_text_at_its_length(assistant_folder):
    generate = Generate(embedded("tiny"), "float32", CPU, assistant_folder)
    prompts = [np.array(embedded_tokenizer().encode(text).ids, np.int32) for text in ("gcd(12,8)=", "gcd(9,6)=")]
    assert all(generate.why_not(way, 1) is None for way in WAYS)
    assert generate.run("assisted", prompts, [5, 40], 1, 1.0) > 0
    for prompt in prompts:
        plain, *others = (generate._batch(way, [prompt], 40, 0.0) for way in WAYS)
        assert plain.shape == (1, len(prompt) + 40)
        assert all(torch.equal(other, plain) for other in others)


def test_an_assistant_of_another_vocabulary_is_an_error(assistant_folder, tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=25, num_key_value_heads=1, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"--assistant .* has 25 tokens, the model 24"):
        Generate(assistant_folder, "float32", CPU, tmp_path)
    assert "--assistant" in str(Generate(assistant_folder, "float32", CPU).why_not("assisted", 1))


def test_an_assistant_without_weights_is_one_line(assistant_folder, tmp_path):
    shutil.copy(assistant_folder / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"^--assistant .*safetensors") as found:
        Generate(assistant_folder, "float32", CPU, tmp_path)
    assert "\n" not in str(found.value)


def test_mismatches_are_counted(subject):
    plain, drafted = run(subject, OFF, 4), run(subject, Strategy("drafter", 3), 4)
    assert plain.num_tokens == drafted.num_tokens > 50
    assert num_mismatched(plain.rollouts, drafted.rollouts) == 0
    plain.rollouts[1].response_tokens[2] += 1
    assert num_mismatched(plain.rollouts, drafted.rollouts) == 1
    assert drafted.accept_length > 1.5 > plain.accept_length == 1.0


def test_phases_add_up_to_the_wall_time(subject):
    runs = [run(subject, Strategy("drafter", 3), 6), run(subject, Strategy("drafter", 3), 4)]
    phases = milliseconds_of(runs)
    assert min(phases.draft, phases.verify, phases.sample, phases.overhead) > 0
    whole = phases.draft + phases.verify + phases.sample + phases.overhead
    assert whole * phases.num_rounds == pytest.approx(1000 * sum(each.seconds for each in runs))


def test_lengths_that_are_forced_are_the_engines(subject):
    work = workload(lengths="long-tail", max_new_tokens=40)
    limits = Limits(4, work.max_prompt_tokens, work.max_new_tokens)
    engine = make_engine(subject, limits, 1.0, (OFF,), work.requests(2, 0, Stream.CALIBRATION))
    requests = work.requests(8, 0)
    wanted = {request.key: request.params.max_tokens for request in requests}
    assert {r.key: len(r.response_tokens) for r in roll_out(engine, requests).rollouts} == wanted
    assert len(set(wanted.values())) > 3


def test_a_round_reads_every_weight_once(subject):
    shape = subject.decoder.shape
    assert shape.tied_head
    assert bytes_per_round(subject) == 4 * shape.num_parameters


def test_loads_and_orders():
    plan = Plan((1,), 64, 32, (OFF,), 1, False, 0.0)
    assert [load_of(size, plan).count for size in (1, 8, 32)] == [16, 32, 64]
    assert [rotated(["a", "b", "c"], by) for by in (0, 1, 5)] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]


# -- options ------------------------------------------------------------------------------------------------------

MISTAKES = [
    ("rollout embedded:tiny --batches 0", "--batches 0"),
    ("rollout embedded:tiny --batches 1,16 --sequences 4", "--sequences 4 never fill 16 rows"),
    ("rollout embedded:tiny --sequences 0", "--sequences 0"),
    ("rollout embedded:tiny --repeats 0", "--repeats 0"),
    ("rollout embedded:tiny --temperature -1", "--temperature -1"),
    ("rollout embedded:tiny --temperature nan", "--temperature nan"),
    ("rollout embedded:tiny --max-new-tokens 0", "--max-new-tokens 0"),
    ("rollout embedded:tiny --json /nowhere/at/all.json", "--json /nowhere/at/all.json"),
    ("rollout embedded:tiny --plots pyproject.toml", "--plots pyproject.toml"),
    ("rollout embedded:tiny --assistant tests", "--assistant tests"),
    ("rollout embedded:tiny --strategies drafter-0", "--strategies: strategy 'drafter-0'"),
    ("rollout embedded:tiny --strategies eagle-4", "--strategies: strategy 'eagle-4'"),
    ("rollout embedded:tiny --strategies drafter-4a0", "--strategies: strategy 'drafter-4a0'"),
    ("rollout embedded:tiny --profile-seconds -1", "--profile-seconds -1"),
    ("rollout embedded:tiny --drafter tests", "--drafter tests"),
    ("rollout embedded:tiny --prompts nowhere.jsonl", "--prompts nowhere.jsonl"),
    ("rollout embedded:tiny --max-new-tokens 100000", "--max-new-tokens 100000"),
    ("rollout nowhere", "nowhere"),
    ("accept embedded:tiny --responses 0", "--responses 0"),
    ("accept embedded:tiny --temperatures 1,-1", "--temperatures -1"),
    ("accept somewhere", "add --drafter FOLDER"),
    ("accept embedded:tiny --drafter tests", "--drafter tests"),
]


@pytest.mark.parametrize(("line", "named"), MISTAKES)
def test_a_mistake_is_one_line_that_names_it(line, named, capsys):
    assert main(["bench", *line.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tlt: ")
    assert error.count("\n") == 1
    assert named in error


@pytest.mark.parametrize("line", ["rollout embedded:tiny --batches 1,x", "rollout embedded:tiny extra", "rollout", ""])
def test_what_cannot_be_parsed_ends_with_the_usage(line, capsys):
    with pytest.raises(SystemExit) as end:
        main(["bench", *line.split()])
    assert end.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_defaults_depend_on_the_model():
    embedded = read_options(make_parser().parse_args(["bench", "rollout", EMBEDDED_MODEL]))
    other = read_options(make_parser().parse_args(["bench", "rollout", "somewhere", "--batches", "2,4"]))
    assert (embedded.sequences, embedded.max_live, embedded.lengths, embedded.max_new_tokens) == (128, 32, "own", 512)
    assert (other.sequences, other.max_live, other.lengths, other.max_new_tokens) == (64, 4, "long-tail", 128)


def test_strategies_are_read_by_their_names(subject):
    strategies = (OFF, Strategy("drafter", 6, sharpness=1.5), Strategy("hybrid", 4, branching=3, num_verify=12))
    assert chosen_strategies([strategy.name for strategy in strategies], subject) == strategies
    assert chosen_strategies(["ngram-4"], subject) == (OFF, Strategy("ngram", 4))
    assert {strategy.source for strategy in chosen_strategies((), subject)} >= {"off", "ngram", "drafter"}
    alone = replace(subject, drafter=None)
    assert not any(strategy.has_drafter for strategy in chosen_strategies((), alone))
    with pytest.raises(ValueError, match="has no drafter"):
        chosen_strategies(["drafter-4"], alone)


# -- the commands -------------------------------------------------------------------------------------------------


def test_bench_rollout_leaves_its_figures_and_pictures(assistant_folder: Path, tmp_path: Path, capsys, monkeypatch):
    """Small, but all of it: three ways of decoding, two batch sizes, a rollout, JSON and plots."""
    monkeypatch.setenv("TLT_CACHE", str(tmp_path / "cache"))
    line = "embedded:tiny --batches 1,2 --sequences 3 --max-live 3 --max-new-tokens 24 --repeats 2"
    line += " --strategies off,ngram-4,drafter-3 --profile-seconds 0.2"
    line += f" --assistant {assistant_folder} --json {tmp_path / 'out.json'} --plots {tmp_path / 'p'}"
    assert main(["bench", "rollout", *line.split()]) == 0
    tree = json.loads((tmp_path / "out.json").read_text())
    assert list(tree["batch"]) == ["1", "2"]
    wanted = {"plain_tokens_per_second", "adaptive_tokens_per_second", "generate_tokens_per_second"}
    for batch in tree["batch"].values():
        assert wanted | {"bandwidth_fraction", "accept_length", "share_of_linear_only"} <= set(batch)
        assert 0 < batch["bandwidth_fraction"] < 1.5
        assert batch["exactness"]["mismatched_tokens"] == 0
        assert batch["exactness"]["tokens_compared"] == 3 * batch["tokens"]  # plain once more, adaptive twice
        assert set(batch["milliseconds"]) == {"plain", "adaptive"}
        assert batch["strategies"]["off"]["accept_length"] == 1
        assert batch["strategies"]["drafter-3"]["accept_length"] > 1.5
        assert len(batch["seconds"]["generate"]) == 2
    for way in ("prompt_lookup", "assisted"):
        assert tree["batch"]["1"][f"{way}_tokens_per_second"] > 0
        assert "one sequence at a time" in tree["batch"]["2"]["skipped"][way]
    assert tree["settings"]["assistant"] == str(assistant_folder)
    assert {"plain_seconds", "adaptive_seconds", "generate_seconds"} <= set(tree["rollout"])
    assert {"date", "machine", "versions", "model", "settings", "memory"} <= set(tree)
    names = {path.name for path in (tmp_path / "p").iterdir()}
    assert names == {"tokens_per_second.png", "accept_length.png", "milliseconds.png"}
    assert "times plain" in capsys.readouterr().out


def test_bench_accept_leaves_its_figures(tmp_path: Path, capsys):
    path = tmp_path / "out.json"
    line = f"accept embedded:tiny --responses 4 --max-new-tokens 48 --temperatures 0,1 --json {path}"
    assert main(["bench", *line.split()]) == 0
    tree = json.loads(path.read_text())["temperature"]
    assert list(tree) == ["0", "1"]
    warm = tree["1"]["everywhere"]
    assert set(warm["first_level"]) == {"1", "2", "4"}
    for rules in [*warm["first_level"].values(), *warm["accept_length"].values()]:
        assert set(rules) == {"shared_noise", "rejection", "top_k"}
    one = warm["first_level"]["1"]
    assert one["rejection"]["value"] >= warm["one_minus_tv"] - 1e-6  # the best sharpness is no worse than 1
    assert 1 < warm["accept_length"]["chain-1"]["shared_noise"]["value"] <= 2
    assert warm["accept_length"]["tree-3x4"]["shared_noise"]["value"] <= 4
    assert "gain" in capsys.readouterr().out


def test_a_shape_is_benched_without_weights(tmp_path):
    command = [
        sys.executable,
        str(Path(__file__).parents[1] / "tools" / "bench_shape.py"),
        "--config",
        str(embedded("tiny") / "config.json"),
    ]
    sizes = ["--batches", "1,3", "--new-tokens", "12", "--prompt-tokens", "5", "--repeats", "1", "--dtype", "float32"]
    done = subprocess.run(
        [*command, *sizes, "--json", str(tmp_path / "out.json")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert set(report["batch"]) == {"1", "3"}
    for batch, found in report["batch"].items():
        share = found["rounds_per_second"] * report["bytes_per_round"] / report["bandwidth"]
        assert found["bandwidth_fraction"] == pytest.approx(share)
        assert found["tokens_per_second"] == pytest.approx(found["rounds_per_second"] * int(batch))
