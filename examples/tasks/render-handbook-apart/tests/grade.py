"""Grade what arrived of /srv/site, by what it makes of given and made pages."""

import json
import os
import pathlib
import random
import shutil
import subprocess
import tempfile

PROGRAM = "/srv/site/render"
PAGES = "/srv/site/pages"
PUBLIC = "/srv/site/public"
NOBODY = 65534

GIVEN = {
    "beds.page": "# Beds & frames\n\nA cold frame shelters seedlings.\nSee [[seeds]] and [[tools|the tools]].\n\n- glass\n- a box, <60 cm high\n",
    "seeds.page": "# Seeds\n\nSow in March. Not in [[winter]].\n",
    "tools.page": "# Tools\n\nFor [[beds]], and for [[tools]] themselves.\n",
}
WORDS = ["sow", "a&b", "<water>", '"well"', "it's", "[[", "]]", "[[]]", "[[a b]]", "[[x|]]", "-", "- no item", "&amp;", "Ærø", "|"]
NAMES = ["a", "B", "a-b", "long_name", "0", "Zz", "page"]
ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}


def escaped(text):
    return "".join(ENTITIES.get(char, char) for char in text)


class Site:
    """Made pages, and what is right for them: built from the parts, not read back."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.titles = {
            name: self.rng.choice(["Peas", "peas", "A & B", 'The "old" bed', "[[a]]", f"On {name}"])
            for name in self.rng.sample(NAMES, self.rng.randint(0, len(NAMES)))
        }
        self.links = {name: set() for name in self.titles}
        made = {name: self.page(name) for name in self.titles}
        self.files = {f"{name}.page": text for name, (text, _) in made.items()} | {"notes.txt": "# no page\n"}
        self.right = {f"{name}.html": html + self.sources(name) for name, (_, html) in made.items()}
        self.right["index.html"] = self.head("All pages") + self.list(
            [self.anchor(name) for name in sorted(self.titles, key=lambda n: (self.titles[n].encode(), n.encode()))]
        )

    def head(self, title):
        return f"<!doctype html>\n<title>{escaped(title)}</title>\n<h1>{escaped(title)}</h1>\n"

    def list(self, items):
        return "<ul>\n" + "".join(f"<li>{one}</li>\n" for one in items) + "</ul>\n" if items else ""

    def anchor(self, name):
        return f'<a href="{name}.html">{escaped(self.titles[name])}</a>'

    def sources(self, name):
        others = sorted((one for one in self.titles if one != name and name in self.links[one]), key=str.encode)
        return "<h2>Linked from</h2>\n" + self.list(list(map(self.anchor, others))) if others else ""

    def words(self, page):
        """Return a line and its HTML."""
        line, html = [], []
        for _ in range(self.rng.randint(1, 6)):
            if self.rng.random() < 0.4:
                name = self.rng.choice(NAMES)
                shown = self.rng.choice([None, "shown & told", "a]b", "x|y"])
                self.links[page].add(name)
                line.append(f"[[{name}]]" if shown is None else f"[[{name}|{shown}]]")
                text = escaped(self.titles.get(name, name) if shown is None else shown)
                known = name in self.titles
                html.append(f'<a href="{name}.html">{text}</a>' if known else f'<span class="missing">{text}</span>')
            else:
                word = self.rng.choice([one for one in WORDS if line or not one.startswith("-")])
                # "[[" before a later "]]" could be taken for the beginning of another link.
                word = word if word not in {"[[", "[[x|]]"} else "[ ["
                line.append(word)
                html.append(escaped(word))
        return " ".join(line), " ".join(html)

    def page(self, name):
        title = self.titles[name]
        text, html = f"# {title}" + self.rng.choice(["", "  "]) + "\n", self.head(title)
        for _ in range(self.rng.randint(0, 5)):
            lines = [self.words(name) for _ in range(self.rng.randint(1, 4))]
            text += "\n" * self.rng.choice([1, 1, 2])
            blanks = [self.rng.choice(["", " "]) for _ in lines]
            if self.rng.random() < 0.5:
                text += "".join(f"- {line}{blank}\n" for (line, _), blank in zip(lines, blanks, strict=True))
                html += self.list([one for _, one in lines])
            else:
                text += "".join(f"{line}{blank}\n" for (line, _), blank in zip(lines, blanks, strict=True))
                html += "<p>" + " ".join(one for _, one in lines) + "</p>\n"
        return text, html


def rendered(pages, out):
    """Return {name: text} of what the program writes."""
    ended = subprocess.run(
        [PROGRAM, pages, out], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", timeout=30, capture_output=True,
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if ended.returncode != 0:
        return f"exit code {ended.returncode}: {ended.stderr[-300:]!r}"
    return {
        name: pathlib.Path(out, name).read_bytes().decode("utf-8", "replace") if os.path.isfile(os.path.join(out, name)) else None
        for name in os.listdir(out)
    }


def difference(said, right):
    if isinstance(said, str):
        return said
    if sorted(said) != sorted(right):
        return f"wrote {sorted(said)} instead of {sorted(right)}"
    for name in sorted(right):
        if said[name] != right[name]:
            lines = zip((said[name] or "").splitlines(), right[name].splitlines())
            pair = next(((a, b) for a, b in lines if a != b), ("other lines", "these"))
            return f"{name}: {pair[0][:120]!r} instead of {pair[1][:120]!r}"
    return None


GIVEN_RIGHT = {
    "beds.html": '<!doctype html>\n<title>Beds &amp; frames</title>\n<h1>Beds &amp; frames</h1>\n<p>A cold frame shelters seedlings. See <a href="seeds.html">Seeds</a> and <a href="tools.html">the tools</a>.</p>\n<ul>\n<li>glass</li>\n<li>a box, &lt;60 cm high</li>\n</ul>\n<h2>Linked from</h2>\n<ul>\n<li><a href="tools.html">Tools</a></li>\n</ul>\n',
    "seeds.html": '<!doctype html>\n<title>Seeds</title>\n<h1>Seeds</h1>\n<p>Sow in March. Not in <span class="missing">winter</span>.</p>\n<h2>Linked from</h2>\n<ul>\n<li><a href="beds.html">Beds &amp; frames</a></li>\n</ul>\n',
    "tools.html": '<!doctype html>\n<title>Tools</title>\n<h1>Tools</h1>\n<p>For <a href="beds.html">Beds &amp; frames</a>, and for <a href="tools.html">Tools</a> themselves.</p>\n<h2>Linked from</h2>\n<ul>\n<li><a href="beds.html">Beds &amp; frames</a></li>\n</ul>\n',
    "index.html": '<!doctype html>\n<title>All pages</title>\n<h1>All pages</h1>\n<ul>\n<li><a href="beds.html">Beds &amp; frames</a></li>\n<li><a href="seeds.html">Seeds</a></li>\n<li><a href="tools.html">Tools</a></li>\n</ul>\n',
}  # fmt: skip


def check():
    if not os.path.isfile(PROGRAM):
        return f"{PROGRAM}: no such file"
    if {one: pathlib.Path(PAGES, one).read_text() for one in os.listdir(PAGES)} != GIVEN:
        return f"{PAGES} was changed"
    for number in range(26):
        place = tempfile.mkdtemp()
        try:
            os.chmod(place, 0o755)
            pages, right = PAGES, GIVEN_RIGHT
            if number:
                site = Site(f"render-handbook-apart/{number}")
                pages, right = os.path.join(place, "pages"), site.right
                os.mkdir(pages)
                for name, text in site.files.items():
                    pathlib.Path(pages, name).write_bytes(text.encode())
            os.mkdir(work := os.path.join(place, "work"))
            os.chown(work, NOBODY, NOBODY)
            problem = difference(rendered(pages, os.path.join(work, "out")), right)
            if problem:
                return f"{'made pages' if number else PAGES}: {problem}"
        finally:
            shutil.rmtree(place, ignore_errors=True)
    return None


def main():
    # It was excluded; if it is here, the platform has graded on other terms than it said.
    assert not os.path.exists(PUBLIC), PUBLIC
    try:
        problem = check()
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        problem = f"it could not be run: {error}"
    print(problem or "all is right")
    pathlib.Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": 0.0 if problem else 1.0}))


main()
