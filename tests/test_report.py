"""report.html and the model card's tables: the same numbers, readable without a network."""

import base64
import html
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from decode_fixtures import byte_tokenizer
from train_fixtures import config, model_folder

from hispec.card import measured
from hispec.decode.request import Completion
from hispec.errors import FileError
from hispec.model import HiSpecModel
from hispec.train.loop import train
from hispec.train.report import pieces, write_report


class Page(HTMLParser):
    """What a page loads, its pictures, its table cells, and its marked tokens with what hovering says."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.pictures: dict[str, str] = {}
        self.cells: list[str] = []
        self.tokens: list[tuple[str, str, str]] = []
        self.tags = [""]
        self._token: tuple[str, str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        own = {name: value or "" for name, value in attrs}
        self.loads += [own[name] for name in ("src", "href", "srcset", "data") if name in own]
        if tag == "img":
            kind, _, data = own["src"].partition(",")
            assert kind == "data:image/svg+xml;base64"
            self.pictures[own["alt"]] = base64.b64decode(data).decode()
        if tag in ("td", "th"):
            self.cells.append("")
        if tag == "span" and "title" in own:
            self._token = own["class"], own["title"]

    def handle_data(self, data: str) -> None:
        if self._token is not None:
            self.tokens.append((*self._token, data))
        elif self.tags[-1] in ("td", "th"):
            self.cells[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._token = None
        self.tags.append("/" + tag)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that evaluated twice."""
    folder = tmp_path_factory.mktemp("report")
    settings = config(
        folder, model_folder(folder, "llama_gqa"), train__max_steps=4, eval__every=2, head__kind="mlp"
    )  # fmt: skip
    train(settings)
    return Path(settings.run_dir)


def test_the_page_needs_no_network(run: Path) -> None:
    text = (run / "report.html").read_text()
    page = Page(text)
    assert len(page.pictures) == 5
    assert all(load.startswith("data:") for load in page.loads)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    for svg in [text, *page.pictures.values()]:
        # Names of XML's vocabularies are not places.
        assert not re.search(r"https?://(?!www\.w3\.org/(2000/svg|1999/xlink|Graphics/SVG/1\.1/DTD/))", svg)
        assert "@import" not in svg and not re.search(r"url\((?!#)", svg)
    for svg in page.pictures.values():
        paths = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}path")
        assert sum(1 for _ in paths) > 10


def test_report_and_card_have_the_same_numbers(run: Path) -> None:
    page = Page((run / "report.html").read_text())
    card = (run / "heads" / "README.md").read_text()
    model = HiSpecModel.from_pretrained(run / "heads")
    tables = measured(model.metrics)
    assert [len(table.rows) for table in tables] == [2, 1, 2]
    for table in tables:
        assert f"{table.title}:" in card
        for row in [table.header, *table.rows]:
            assert f"| {' | '.join(row)} |" in card
            assert any(page.cells[at : at + len(row)] == row for at in range(len(page.cells)))
    assert f"{model.metrics['exits'][1]['top1']:.1%}" in page.cells
    assert "value: 0." in card and "metric" in card.partition("\n---")[0]


def test_every_token_shows_whose_choice_it_was(run: Path) -> None:
    page = Page((run / "report.html").read_text())
    model = HiSpecModel.from_pretrained(run / "heads")
    assert 3 <= len(page.tokens) <= 3 * 12
    levels = {"l0": "drafted at exit 2, accepted by exit 4 and the full model",
              "l1": "chosen by exit 4, accepted by the full model", "l2": "chosen by the full model"}  # fmt: skip
    for kind, hover, text in page.tokens:
        number, token, level = re.fullmatch(r"token (\d+), id (\d+): (.*)", hover).groups()  # type: ignore[union-attr]
        assert level == levels[kind]
        shown = str(model.tokenizer.decode([int(token)]))
        assert text == shown if number == "1" else text.strip() == shown.strip()
    text = (run / "report.html").read_text()
    assert "&lt;|user|&gt;" in text and "<|user|>" not in text
    counts = [int(n) for n in re.findall(r": (\d+) tokens\n\(", text)]
    assert len(counts) == 3 and sum(counts) == model.metrics["tokens"] == len(page.tokens)


def test_a_report_that_cannot_be_written_is_one_line(run: Path, tmp_path: Path) -> None:
    model = HiSpecModel.from_pretrained(run / "heads")
    for name in ("config.yaml", "environment.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    text = "<script>alert(1)</script>"
    done = Completion(0, [7, 8], [9, 10], "", "length", chosen_by=[0, 2])
    model.base = text
    write_report(tmp_path, model, [done])
    page = (tmp_path / "report.html").read_text()
    assert html.escape(text) in page and text not in page
    (tmp_path / "report.html").unlink()
    (tmp_path / "report.html").mkdir()
    with pytest.raises(FileError, match=r"cannot write .*report\.html"):
        write_report(tmp_path, model, [done])


def test_characters_of_several_tokens_are_the_last_ones() -> None:
    tokenizer = byte_tokenizer()
    text = "h\u00e9 \U0001f600!"
    ids = tokenizer(text).input_ids
    found = pieces(tokenizer, ids)
    assert len(found) == len(ids) > len(text)
    assert found[:3] == ["h", "", "\u00e9"] and "".join(found) == text
    cut = pieces(tokenizer, ids[:2])
    assert cut[0] == "h" and len(cut) == 2


def test_places_that_were_seldom_judged_are_left_out() -> None:
    judge = {"judge": "full model", "accepted": 0.5, "accepted_at": [150, 2, 1], "judged_at": [200, 4, 2]}
    metrics = {
        "exits": [{"exit": 4, "top1": 0.5, "acceptance": 0.5, "tokens_per_full_pass": 1.5}],
        "simulated_tokens_per_full_pass": 1.5, "measured_tokens_per_full_pass": 1.5, "identical_outputs": 1.0,
        "policy": "fixed:3", "judges": [judge],
    }  # fmt: skip
    assert measured(metrics)[-1].rows == [["full model", "50.0%", "75%", "50%"]]
    assert measured({}) == []
