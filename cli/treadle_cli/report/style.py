"""The page's style sheet."""

STYLE = """
body{margin:0;background:#fff;color:#1b1f24;font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1240px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:26px;line-height:1.25;margin:0 0 6px}
h2{font-size:18px;margin:34px 0 8px}
p,ul{max-width:880px;margin:6px 0}
.facts,.small{color:#6b7280}
.small{font-size:13px}
.events{border-left:4px solid #cc3d8f;background:#fdf2f8;padding:2px 18px 12px;margin-top:18px}
.events h2{margin-top:12px}
.columns{display:flex;flex-wrap:wrap;gap:0 48px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:5px 14px 5px 0;border-bottom:1px solid #e5e7eb;text-align:right;white-space:nowrap}
th{font-weight:600}
td:first-child,th:first-child{text-align:left}
td i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:8px}
td.better{color:#00795a;font-weight:600}
td.worse{color:#b4341f;font-weight:600}
"""
