#!/bin/sh
cat > /srv/site/render <<'END'
#!/usr/bin/python3
import os
import re
import sys

LINK = re.compile(r"\[\[([A-Za-z0-9_-]+)(?:\|(.+?))?\]\]")
HEAD = "<!doctype html>\n<title>{0}</title>\n<h1>{0}</h1>\n"


def escaped(text):
    for char, entity in (("&", "amp"), ("<", "lt"), (">", "gt"), ('"', "quot")):
        text = text.replace(char, f"&{entity};")
    return text


def parse(path):
    with open(path, encoding="utf-8", newline="") as file:
        title, *lines = (line.rstrip() for line in file.read().split("\n"))
    blocks, block = [], []
    for line in [*lines, ""]:
        if line:
            block.append(line)
        elif block:
            blocks.append(block)
            block = []
    return title[2:].strip(), blocks


def is_list(block):
    return all(line.startswith("- ") for line in block)


def texts(block):
    return [line[2:].strip() for line in block] if is_list(block) else [" ".join(line.strip() for line in block)]


def inline(text, titles):
    out, end = "", 0
    for link in LINK.finditer(text):
        name, shown = link[1], escaped(link[2] or titles.get(link[1], link[1]))
        out += escaped(text[end : link.start()])
        out += f'<a href="{name}.html">{shown}</a>' if name in titles else f'<span class="missing">{shown}</span>'
        end = link.end()
    return out + escaped(text[end:])


def listed(items):
    return "<ul>\n" + "".join(f"<li>{one}</li>\n" for one in items) + "</ul>\n"


def anchor(name, titles):
    return f'<a href="{name}.html">{escaped(titles[name])}</a>'


def main(source, target):
    pages = {name[:-5]: parse(os.path.join(source, name)) for name in os.listdir(source) if name.endswith(".page")}
    titles = {name: title for name, (title, _) in pages.items()}
    links = {name: {link[1] for block in blocks for text in texts(block) for link in LINK.finditer(text)}
             for name, (_, blocks) in pages.items()}
    os.makedirs(target, exist_ok=True)

    def write(name, text):
        with open(os.path.join(target, f"{name}.html"), "w", encoding="utf-8", newline="") as file:
            file.write(text)

    for name, (title, blocks) in pages.items():
        html = HEAD.format(escaped(title))
        for block in blocks:
            shown = [inline(text, titles) for text in texts(block)]
            html += listed(shown) if is_list(block) else f"<p>{shown[0]}</p>\n"
        sources = sorted(other for other in pages if other != name and name in links[other])
        if sources:
            html += "<h2>Linked from</h2>\n" + listed(anchor(other, titles) for other in sources)
        write(name, html)
    order = sorted(titles, key=lambda name: (titles[name].encode(), name))
    write("index", HEAD.format("All pages") + (listed(anchor(name, titles) for name in order) if order else ""))


main(*sys.argv[1:])
END
chmod 755 /srv/site/render
/srv/site/render /srv/site/pages /srv/site/public
