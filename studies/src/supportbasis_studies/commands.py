"""``supportbasis reproduce``: the paper's experiments and a study of polynomial attention."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from supportbasis import InputError
from supportbasis.cli.loading import chosen_dtype
from supportbasis.cli.terminal import console, friendly, writable

from .distribution import BUILT_IN, PRESETS, Access, Wish, check_installed, run_distribution
from .downstream import (
    BENCHMARKS,
    METHODS,
    Chat,
    OwnChat,
    ProtocolExtent,
    UserChat,
    chosen_methods,
    chosen_tasks,
    only,
    own_subject,
    run_benchmarks,
    run_downstream,
    run_protocol,
    stories_folder,
)
from .downstream import FULL as WHOLE_DOWNSTREAM
from .downstream import QUICK as QUICK_DOWNSTREAM
from .downstream import Wish as BenchmarkWish
from .efficiency import FULL as WHOLE_EFFICIENCY
from .efficiency import QUICK as QUICK_EFFICIENCY
from .efficiency import run_efficiency
from .polynomial_attention import FULL as WHOLE_STUDY
from .polynomial_attention import QUICK as QUICK_STUDY
from .polynomial_attention import run_study
from .study import chosen_device, write_index
from .video import FULL as WHOLE_VIDEO
from .video import QUICK as QUICK_VIDEO
from .video import WEIGHTS, run_video, video_extent

QUICK_ITEMS = 10  # of each benchmark, for a model of the user's
PROTOCOL_ITEMS = 2000  # of each task, in the authors' protocol
BATCH = 10  # of them are answered at once
ALL_ITEMS, FEW_ITEMS = 100, 2  # of the same in `all`, which would take a day otherwise

reproduce = typer.Typer(
    help="Studies of the paper's claims, each with a report.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


Quick = Annotated[bool, typer.Option("--quick", help="Short inputs, few items.")]
Download = Annotated[bool, typer.Option("--download", help="Fetch the model if need be.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]
Device = Annotated[
    str, typer.Option(help="Where the models run: cpu, cuda, or another of PyTorch's.")
]
DTYPE = "Of the model, for example bfloat16. \\[default: float32 on a CPU, else that of its file"
Dtype = Annotated[str | None, typer.Option(metavar="NAME", help=f"{DTYPE}]")]
Redraw = Annotated[
    bool, typer.Option("--redraw", help="Only draw and report what --out holds already.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of inputs and sampled rows.")]


@reproduce.command()
def efficiency(
    quick: Quick = False,
    redraw: Redraw = False,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path(
        "supportbasis-out/efficiency"
    ),
) -> None:
    """Time and error against the threshold, as in the paper's figure, and on harder inputs."""
    with friendly("reproduce efficiency"):
        extent = QUICK_EFFICIENCY if quick else WHOLE_EFFICIENCY
        run_efficiency(extent, writable(out), seed, console(), redraw=redraw)


@reproduce.command()
def distribution(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_DIR",
            help="A folder, a name on the hub, or one of the paper's: "
            f"{', '.join(PRESETS)}. \\[default: {BUILT_IN}]",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Your own text. \\[default: a story, and h repeated]"),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(min=16, help="Tokens the model sees at once. \\[default: 2048, or its limit]"),
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    download: Download = False,
    trust_remote_code: TrustRemoteCode = False,
    quick: Annotated[bool, typer.Option("--quick", help="One window of each text.")] = False,
    redraw: Redraw = False,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path(
        "supportbasis-out/distribution"
    ),
) -> None:
    """Entries of Q, K and V in every layer of a model, beside the bounds of the paper."""
    with friendly("reproduce distribution"):
        access = Access(download, trust_remote_code)
        wish = Wish(model, text, window, access, 1 if quick else None, device, dtype)
        run_distribution(wish, writable(out), console(), redraw=redraw)


@reproduce.command()
def downstream(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_DIR",
            help="A model of your own, on the benchmarks of --tasks. \\[default: two small models "
            "that come with the package, on generated tasks]",
        ),
    ] = None,
    protocol: Annotated[
        str,
        typer.Option(
            metavar="lm-eval|paper",
            help="How a model of your own is asked: by lm-eval, or as the authors ask LLaDA, with "
            "the benchmarks of --data. Without --model, paper asks the diffusion model of the "
            "package.",
        ),
    ] = "lm-eval",
    tasks: Annotated[
        str | None,
        typer.Option(help=f"For --model, names. \\[default: {', '.join(BENCHMARKS)}]"),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="For --protocol paper and --model: folder of gsm8k_test.jsonl, arc_easy.jsonl, "
            "arc_challenge.jsonl, hellaswag_val*.jsonl, mmlu_test/*.csv.",
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help=f"For --protocol paper: {', '.join(METHODS)}. \\[default: all]"),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="For --model or --protocol paper: items of each task, at most."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="For --protocol paper: items answered at once. \\[default: 10]"),
    ] = None,
    models: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder with stories260K/. \\[default: $SUPPORTBASIS_MODELS]"
        ),
    ] = None,
    download: Download = False,
    trust_remote_code: TrustRemoteCode = False,
    device: Device = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"{DTYPE}; with --protocol paper float32]"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few items: about two minutes; confirms nothing.")
    ] = False,
    redraw: Redraw = False,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path(
        "supportbasis-out/downstream"
    ),
) -> None:
    """Answers with approximate attention in every layer of a model, as in the paper's table."""
    with friendly("reproduce downstream"):
        if protocol not in ("lm-eval", "paper"):
            raise InputError(f"--protocol: got {protocol!r}, expected lm-eval or paper")
        if protocol == "lm-eval":
            given = {"--data": data, "--methods": methods, "--batch": batch}
            _refuse(given, "for --protocol paper: add it")
        if model is None:
            given = {"--dtype": dtype, "--download": download}
            given |= {"--trust-remote-code": trust_remote_code}
            if protocol == "lm-eval":
                given |= {"--tasks": tasks, "--limit": limit}
            _refuse(given, "for a model of your own: add --model")
        if model is not None or protocol == "paper":
            _refuse(
                {"--models": models},
                "for the models of the package: omit --model and --protocol paper",
            )
        wish = None
        if model is not None:
            access = Access(download, trust_remote_code)
            items = limit or (QUICK_ITEMS if quick else None)
            kept = chosen_dtype(dtype or ("float32" if protocol == "paper" else None))
            wish = BenchmarkWish(model, chosen_tasks(tasks), items, access, dtype=kept)
        if protocol == "paper":
            chat = _chat(wish, data, device, tasks)
            items = limit or (QUICK_ITEMS if quick else PROTOCOL_ITEMS)
            extent = ProtocolExtent(chosen_methods(methods), items, batch or BATCH)
            run_protocol(chat, extent, writable(out), console(), redraw=redraw)
        elif wish is None:
            extents = QUICK_DOWNSTREAM if quick else WHOLE_DOWNSTREAM
            found = stories_folder(models)
            run_downstream(extents, writable(out), found, console(), device=device, redraw=redraw)
        else:
            run_benchmarks(wish, writable(out), console(), device=device, redraw=redraw)


def _refuse(given: Mapping[str, object], why: str) -> None:
    """Raise if one of the arguments is given."""
    named = [name for name, value in given.items() if value is not None and value is not False]
    if named:
        raise InputError(f"{', '.join(named)}: only {why}")


def _chat(wish: BenchmarkWish | None, data: Path | None, device: str, tasks: str | None) -> Chat:
    """Who is asked in the authors' protocol."""
    if wish is not None:
        if data is None:
            raise InputError("--data: --protocol paper reads benchmarks from files; add a folder")
        return UserChat(wish, data, chosen_device(device))
    if data is not None:
        raise InputError(
            "--data: the model of the package knows no English and is asked generated tasks; add "
            "--model, or omit --data"
        )
    chat = OwnChat(own_subject("diffusion", device))
    return chat if tasks is None else only(chat, chosen_tasks(tasks))


@reproduce.command("all")
def everything(
    quick: Quick = False,
    redraw: Redraw = False,
    device: Device = "cpu",
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder of the reports.")] = Path("supportbasis-out"),
) -> None:
    """Every study, one after the other, each in a folder of its own."""
    with friendly("reproduce all"):
        check_installed()
        writable(out)
        chosen_device(device)
    efficiency(quick, redraw, seed, out / "efficiency")
    distribution(device=device, quick=quick, redraw=redraw, out=out / "distribution")
    downstream(device=device, quick=quick, redraw=redraw, out=out / "downstream")
    items = FEW_ITEMS if quick else ALL_ITEMS
    protocol = out / "downstream-protocol"
    downstream(
        protocol="paper", limit=items, device=device, quick=quick, redraw=redraw, out=protocol
    )
    # these two keep no rows to draw again
    if not (redraw and (out / "polynomial-attention" / "report.html").is_file()):
        polynomial_attention(quick, seed, out / "polynomial-attention")
    if not (redraw and (out / "video" / "report.html").is_file()):
        # on a CPU all clips and baselines would take more than a day
        few = device == "cpu" and not quick
        clips = 1 if few else None
        video(
            clips=clips, device=device, baselines=not few, quick=quick, seed=seed, out=out / "video"
        )
    with friendly("reproduce all"):
        parts = {
            "efficiency": "time and error",
            "distribution": "entries of Q, K and V",
            "downstream": "answers with approximate attention",
            "downstream-protocol": "the same in the authors' protocol",
            "polynomial-attention": "one polynomial attention against several",
            "video": "clips of a diffusion transformer",
        }
        write_index(out, "supportbasis reproduce all", parts)


@reproduce.command("polynomial-attention")
def polynomial_attention(
    quick: Annotated[bool, typer.Option("--quick", help="Short inputs and few seeds.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of inputs and sketches.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path(
        "supportbasis-out/polynomial-attention"
    ),
) -> None:
    """Softmax against one polynomial, one power and several, sketched or not."""
    with friendly("reproduce polynomial-attention"):
        extent = QUICK_STUDY if quick else WHOLE_STUDY
        run_study(extent, writable(out), seed, console())


@reproduce.command()
def video(
    changes: Annotated[
        str | None,
        typer.Option(metavar="X,X,...", help="Of the prediction, squared, that plans allow."),
    ] = None,
    clips: Annotated[int | None, typer.Option(min=1, help="How many. \\[default: 8]")] = None,
    weights: Annotated[Path, typer.Option(help="Of the model.")] = WEIGHTS,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    baselines: Annotated[
        bool, typer.Option(help="Sample with sparse attention too: it takes most of the time.")
    ] = True,
    quick: Annotated[bool, typer.Option("--quick", help="Clips of 2048 tokens.")] = False,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path(
        "supportbasis-out/video"
    ),
) -> None:
    """Clips of a small video model by exact attention, by plans and by sparse attention."""
    with friendly("reproduce video"):
        extent = video_extent(QUICK_VIDEO if quick else WHOLE_VIDEO, changes, clips)
        where = chosen_device(device)
        run_video(extent, writable(out), weights, seed, where, console(), baselines=baselines)
