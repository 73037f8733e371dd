"""Show the evaluations of several runs on one page: report.html, report.md and report.csv.

Every `pod eval` writes the report of its own run by itself. This command puts several runs side by side.

  pod report runs/a runs/b --out runs/report
  pod report runs/a --out runs/report --model LLaMA3-8B-32K   beside the papers' numbers of this model"""

from pathlib import Path

from pod.command_line import Parser
from pod.recipe import exit_with


def start() -> None:
    """Run the command line."""
    parser = Parser(description=__doc__)
    runs = "output folders of runs, or the eval folders inside them"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=runs)
    out = "folder for report.html, report.md and report.csv"
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help=out)
    papers = "folder with CSV files of published results; default: the tables that come with pod"
    parser.add_argument("--papers", type=Path, metavar="FOLDER", help=papers)
    model = "name of the model in the papers, for example LLaMA3-8B-32K; default: taken from its path"
    parser.add_argument("--model", metavar="NAME", help=model)
    asked = parser.parse_args()
    from pod.eval.report.write import write_merged  # loads what --help does not need

    try:
        print(write_merged(asked.runs, asked.out, asked.papers, asked.model))
    except (ValueError, OSError) as error:
        exit_with(error)
