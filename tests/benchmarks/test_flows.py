"""How often control changes file, as benchmarks/flows.py counts it."""


def test_a_decoded_token_changes_file_at_most_80_times(script, tmp_path):
    flows = script("flows")
    found = flows.counts_of(flows.decoded_token(tmp_path))
    assert 0 < found["changes"] <= 80


def test_calls_and_returns_between_files_are_changes(script):
    flows = script("flows")

    def calls(items):
        root = flows.Call("", "")
        start = root.called("a.py", "start")
        start.count = 1
        item = start.called("b.py", "item")
        item.count = items
        item.called("b.py", "item.<locals>.<listcomp>").count = 3 * items
        item.called("a.py", "helper").count = items
        return root

    assert flows.counts_of(calls(1)) == {"changes": 4, "files": 2, "functions": 3}
    item = flows.difference(calls(6), calls(2), 4)
    assert flows.counts_of(item) == {"changes": 4, "files": 2, "functions": 2}


def test_house_numbers_see_names_and_imports(script, monkeypatch, tmp_path):
    flows = script("flows")
    for name in ("pod/a/same.py", "pod/b/same.py", "pod/a/args.py", "pod/b/args.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("class Twice:\n    pass\n")
    tests = {"deep": "from pod.a.same import Twice\n", "public": "import pod.a\nfrom pod import a\n"}
    for name, source in tests.items():
        (tmp_path / "tests").mkdir(exist_ok=True)
        (tmp_path / "tests" / f"test_{name}.py").write_text(source)
    for folder in ("benchmarks", "launch"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(flows, "ROOT", tmp_path)
    numbers = flows.house_numbers(with_tests=False)
    assert numbers["file names that exist twice"] == numbers["class names that exist twice"] == 1
    assert (numbers["test files"], numbers["test files that import below a package"]) == (2, 1)
    assert (numbers["product lines"], numbers["test lines"]) == (8, 3)
