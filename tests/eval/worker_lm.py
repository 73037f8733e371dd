"""A rank of the model class: answers every kind of request and writes what it knows as JSON.

Arguments: file, method.
"""

import json
import sys
from pathlib import Path

import lm_tools

from pod.eval.answer.answer_cache import AnswerFolder
from pod.eval.answer.ranks import Ranks
from pod.eval.lm.index import Rule


def answer(spec: str, folder: Path | None = None, ranks: Ranks | None = None) -> dict:
    answer_cache = AnswerFolder(folder, ranks or Ranks()).answers_of(spec, {})
    lm = lm_tools.around(
        spec, dtype="float32", batch_size=3, answer_cache=answer_cache, one_shot=spec == "full"
    )
    with lm.rules(Rule()):
        found = {
            "loglikelihood": lm.loglikelihood(lm_tools.choices()),
            "rolling": lm.loglikelihood_rolling(lm_tools.texts()),
            "generate": lm.generate_until(lm_tools.generations()),
        }
    return json.loads(json.dumps(found | {"records": lm.records}))


if __name__ == "__main__":
    ranks = Ranks()
    found = answer(sys.argv[2], ranks=ranks)
    Path(f"{sys.argv[1]}.{ranks.rank}").write_text(json.dumps(found), encoding="utf-8")
    ranks.close()
