"""Checks that every page of lineate passes, as programs for the browser."""

CONTRAST = """() => {
    const parse = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map((x) => x / 255)
        .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
        .reduce((sum, x, index) => sum + x * [0.2126, 0.7152, 0.0722][index], 0);
    const back = (x) => {
        for (; x; x = x.parentElement) {
            const colour = parse(getComputedStyle(x).backgroundColor);
            if (colour.length === 3 || colour[3] > 0.99) return colour;
        }
        return null;
    };
    const low = [];
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    let seen = 0;
    while (texts.nextNode()) {
        const x = texts.currentNode.parentElement;
        if (!texts.currentNode.data.trim() || !x.checkVisibility({ visibilityProperty: true })) continue;
        const pair = [light(parse(getComputedStyle(x).color)), light(back(x))].sort((a, b) => b - a);
        const contrast = (pair[0] + 0.05) / (pair[1] + 0.05);
        seen += 1;
        if (contrast < 4.5) low.push(`${contrast.toFixed(2)} ${texts.currentNode.data}`);
    }
    return [seen, low];
}"""
"""Return how many texts are seen, and those whose contrast with what is behind them is below 4.5 to 1."""
